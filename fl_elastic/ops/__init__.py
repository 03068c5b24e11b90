"""Layers that keep only what a plan needs for the backward pass, and models that run in two parts."""
