"""Operations that leave channels what they are, by the ways a traced model may call them."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

__all__ = ["CONVOLUTIONS", "JOINS", "NORMS", "RESHAPES", "keeps_channels"]

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm)
JOINS: frozenset[Any] = frozenset(
    [operator.add, operator.iadd, operator.mul, operator.imul, operator.sub, torch.add, torch.mul,
     torch.sub, "add", "add_", "mul", "mul_", "sub", "sub_"]
)  # fmt: skip
RESHAPES = frozenset(["flatten", "view", "reshape"])

_MODULES = (
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish,
    nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Sigmoid, nn.Tanh, nn.Softplus,
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout,
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
    nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
)  # fmt: skip
_FUNCTIONS: frozenset[Any] = frozenset(
    [torch.relu, torch.relu_, torch.sigmoid, torch.tanh,
     functional.relu, functional.relu_, functional.relu6, functional.leaky_relu, functional.elu,
     functional.gelu, functional.silu, functional.hardswish, functional.hardsigmoid,
     functional.sigmoid, functional.tanh, functional.softplus, functional.mish,
     functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d,
     functional.max_pool1d, functional.max_pool2d, functional.max_pool3d,
     functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d,
     functional.adaptive_avg_pool1d, functional.adaptive_avg_pool2d, functional.adaptive_avg_pool3d,
     functional.adaptive_max_pool1d, functional.adaptive_max_pool2d, functional.adaptive_max_pool3d]
)  # fmt: skip
_METHODS = frozenset(["relu", "relu_", "sigmoid", "tanh", "contiguous", "clone"])


def keeps_channels(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Whether an operation works on every channel by itself and in the same way.

    Parameters
    ----------
    node : torch.fx.Node
        The operation.
    modules : mapping of str to Module
        Modules of the traced model by name.
    """
    if node.op == "call_module":
        return isinstance(modules[str(node.target)], _MODULES)
    if node.target == "mean" or node.target is torch.mean:
        return _mean_over_places(node)
    return node.target in (_METHODS if node.op == "call_method" else _FUNCTIONS)


def _mean_over_places(node: fx.Node) -> bool:
    """Whether a mean goes over positions in space or time only."""
    dims: Any = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    if isinstance(dims, int):
        dims = (dims,)
    ndim = len(node.all_input_nodes[0].meta["tensor_meta"].shape)
    return isinstance(dims, (tuple, list)) and all(d % ndim >= 2 for d in dims)
