"""Forget examples without training, by dampening the weights that matter to them (Foster et al., AAAI 2024)."""
