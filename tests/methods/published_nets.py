"""The published models as plain chains of their convolutions: what a cost rule needs of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from fl_elastic.groups.graph import BackwardGraph
from fl_elastic.groups.trace import trace_step
from fl_elastic.ops.lean_kind import LeanKind
from fl_elastic.profiling.layer_shapes import LayerShape
from fl_elastic.profiling.profile import CostProfile, ProfileKey


def chain_of(layers: Sequence[LayerShape], *, norms: bool = False, classes: int = 10) -> nn.Module:
    """A chain of convolutions of these shapes, each with an activation, then a linear classifier."""
    modules: list[nn.Module] = []
    for la in layers:
        stride = la.in_size[0] // la.out_size[0]
        modules.append(
            nn.Conv2d(la.in_channels, la.out_channels, la.kernel, stride, la.kernel[0] // 2,
                      groups=la.groups, bias=not norms)
        )  # fmt: skip
        modules += [nn.BatchNorm2d(la.out_channels)] * norms
        modules.append(nn.ReLU6())
    head = nn.Linear(layers[-1].out_channels, classes)
    return nn.Sequential(*modules, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)


def graph_of(model: nn.Module, size: int = 128, batch: int = 1) -> BackwardGraph:
    """The backward graph of one step."""
    inputs = torch.zeros(batch, 3, size, size), torch.zeros(batch, dtype=torch.long)
    return trace_step(model.eval(), nn.functional.cross_entropy, inputs).graph


def lean_kind(node: str) -> LeanKind:
    """What a node of the backward pass may keep instead."""
    kinds = {
        "Convolution": LeanKind.CONVOLUTION,
        "BatchNorm": LeanKind.NORM,
        "Relu": LeanKind.GATE,
        "Hardtanh": LeanKind.GATE,
    }
    return next((kind for name, kind in kinds.items() if name in node), LeanKind.NONE)


def made_up_costs(
    graph: BackwardGraph, shape: tuple[int, ...], seconds: Callable[[int], Any], optimizer: float
) -> CostProfile:
    """Costs of a graph of ``seconds(nodes)`` each way, whose nodes keep what they put out."""
    owner = np.array([node.group is not None for node in graph.nodes])
    return CostProfile(
        key=ProfileKey("made up", shape, 1, "none", "none"),
        graph=graph,
        node_update_seconds=np.where(owner, seconds(len(owner)), 0.0),
        node_path_seconds=seconds(len(owner)),
        optimizer_seconds=np.zeros(len(graph.groups)),
        forward_seconds=np.full(len(graph.groups), 2.0),
        fixed_seconds=0.0,
        node_saved_bytes=np.array(
            [4.0 * math.prod(n.shape) if n.shape else 0.0 for n in graph.nodes]
        ),
        node_lean=np.array([lean_kind(node.name) for node in graph.nodes], dtype=float),
        optimizer_bytes_per_weight=optimizer,
    )
