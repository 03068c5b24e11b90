"""Layers that keep only the tensors that a plan needs for the backward pass, and models that run in two parts."""
