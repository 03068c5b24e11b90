"""Layers that keep only what a plan needs for the backward pass, and filtered gradients."""

from fl_elastic.ops.channels import ChannelSubset
from fl_elastic.ops.lean import lean
from fl_elastic.ops.lean_forward import LeanForward, lean_forward

__all__ = ["ChannelSubset", "LeanForward", "lean", "lean_forward"]
