"""Forget examples without training, by dampening weights that are important to them (Foster et al., AAAI 2024)."""
