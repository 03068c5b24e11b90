"""Policies that choose neurons by how fast their outputs change: NEq (2022), SCoTTi (2023) and Velocity (2024)."""

policies = {"neq": "policy", "scotti": "scotti", "velocity": "velocity_policy"}
