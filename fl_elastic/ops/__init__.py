"""Layers that keep only what a plan needs for the backward pass, and filtered gradients."""

from fl_elastic.ops.activations import hardswish, relu, relu6
from fl_elastic.ops.bits import Layout, gate, pack_bits, unpack_bits
from fl_elastic.ops.channel_convolution import channel_conv2d
from fl_elastic.ops.channels import ChannelSubset
from fl_elastic.ops.convolution import frozen_conv2d
from fl_elastic.ops.filtered_convolution import filtered_conv2d
from fl_elastic.ops.geometry import ConvGeometry
from fl_elastic.ops.gradient_filter import (
    filtered_input_gradient,
    filtered_weight_gradient,
    pooled_input,
    tap_shares,
)
from fl_elastic.ops.lean import lean
from fl_elastic.ops.lean_forward import LeanForward, lean_forward
from fl_elastic.ops.linear import FeatureSubset, bias_linear, channel_linear
from fl_elastic.ops.norm import frozen_batch_norm
from fl_elastic.ops.patch_chain import PatchChain, PatchUnit
from fl_elastic.ops.patch_grid import run_patch_chain
from fl_elastic.ops.patches import patch_sums
from fl_elastic.ops.pooling import max_pool2d

__all__ = [
    "ChannelSubset",
    "ConvGeometry",
    "FeatureSubset",
    "Layout",
    "LeanForward",
    "PatchChain",
    "PatchUnit",
    "bias_linear",
    "channel_conv2d",
    "channel_linear",
    "filtered_conv2d",
    "filtered_input_gradient",
    "filtered_weight_gradient",
    "frozen_batch_norm",
    "frozen_conv2d",
    "gate",
    "hardswish",
    "lean",
    "lean_forward",
    "max_pool2d",
    "pack_bits",
    "patch_sums",
    "pooled_input",
    "relu",
    "relu6",
    "run_patch_chain",
    "tap_shares",
    "unpack_bits",
]
