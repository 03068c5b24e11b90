"""Dropping tokens of a transformer in training steps: BSR (2024) and Tri-Level E-ViT (Kong et al., AAAI 2023)."""

policies = {"bsr": "policy", "e_vit": "policy"}
