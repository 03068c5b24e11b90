"""SparseUpdate (Lin et al., NeurIPS 2022): schemes of channels and biases, published or fitted."""

policies = {"sparse_update": "policy"}
