"""Fold a BatchNorm into the convolution before it, for parts of a model that run as inference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fl_elastic.groups.graph import BackwardGraph
from fl_elastic.groups.torch_private import BatchNorm


def foldable_pairs(graph: BackwardGraph, model: nn.Module, below: int = 0) -> list[tuple[str, str]]:
    """Return ``(convolution, norm)`` module names whose norm is the only user of the convolution's output.

    Parameters
    ----------
    graph : BackwardGraph
        Shows which node uses which output.
    model : nn.Module
        Holds the modules.
    below : int
        Only nodes from this index on, that is, at least this deep, are considered.
    """
    modules = dict(model.named_modules())
    users = Counter(inner for node in graph.nodes for inner in node.inputs)
    met = Counter(node.module for node in graph.nodes)
    pairs = []
    for node in graph.nodes[below:]:
        if len(node.inputs) != 1 or not isinstance(modules.get(node.module), BatchNorm):
            continue
        source = graph.nodes[node.inputs[0]]
        alone = users[node.inputs[0]] == met[node.module] == met[source.module] == 1
        if alone and isinstance(modules.get(source.module), nn.Conv2d):
            pairs.append((source.module, node.module))
    return pairs


def fold(convolution: nn.Conv2d, norm: nn.Module) -> Callable[[Tensor], Tensor] | None:
    r"""Return one forward function for a convolution and its norm in eval mode.

    :math:`W' = W\gamma/\sigma` and :math:`b' = (b-\mu)\gamma/\sigma+\beta`.

    None if the norm has no running statistics, so that it cannot run as inference. The weights are copied, so fold
    again after they have changed.
    """
    mean, variance = getattr(norm, "running_mean", None), getattr(norm, "running_var", None)
    if not isinstance(mean, Tensor) or not isinstance(variance, Tensor):
        return None
    with torch.no_grad():
        scale = torch.rsqrt(variance + float(getattr(norm, "eps", 1e-5)))
        if isinstance(gamma := getattr(norm, "weight", None), Tensor):
            scale = scale * gamma
        bias = -mean if convolution.bias is None else convolution.bias - mean
        bias = bias * scale
        if isinstance(beta := getattr(norm, "bias", None), Tensor):
            bias = bias + beta
        weight = convolution.weight * scale.reshape(-1, 1, 1, 1)
        weight = weight.contiguous(memory_format=torch.channels_last)

    def forward(inputs: Tensor) -> Tensor:
        # torch offers no public call that also honours the module's padding mode.
        folded: Tensor = convolution._conv_forward(inputs, weight, bias)
        return folded

    return forward
