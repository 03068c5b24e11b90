"""Gradient filtering: gradients of convolutions from means over patches (Yang et al., CVPR 2023)."""

policies = {"gradient_filter": "policy"}
operations = {"filtered": "operation"}
