"""Neurons by how fast their outputs move: NEq (2022), SCoTTi (2023) and Velocity (2024)."""

policies = {"neq": "policy", "scotti": "scotti", "velocity": "velocity_policy"}
