"""SparseUpdate (Lin et al., NeurIPS 2022): schemes of channels and biases, published or adapted to other models."""

policies = {"sparse_update": "policy"}
