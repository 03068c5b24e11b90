"""Forgetting examples without training, by dampening what mattered to them (Foster et al., AAAI 2024)."""
