"""Which operations of a model keep fewer bytes for the backward pass with lean layers than with torch's."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fl_elastic.groups.graph import BackwardGraph, GroupKind
from fl_elastic.groups.mode import Mode
from fl_elastic.groups.torch_private import BatchNorm, own_parameters

_PRODUCTS = ("Addmm", "Mm", "Linear", "Mul")


class LeanKind(IntEnum):
    """The replacement by which an operation of the model keeps less than with torch's own."""

    NONE = 0
    CONVOLUTION = 1
    NORM = 2
    GATE = 3
    POOL = 4
    PRODUCT = 5
    """A matrix product; torch itself keeps its input only if the weight is trained."""


def lean_kind(module: nn.Module, node: str, shape: Sequence[int]) -> LeanKind:
    """Return which replacement of ``module`` applies to an operation that it made.

    The test is the same as in `lean_forward` and in each replacement, so that predictions match what runs.

    Parameters
    ----------
    module : nn.Module
        The innermost module whose output the operation made.
    node : str
        Autograd's name of the operation; only the module's main operation is replaced.
    shape : sequence of int
        Shape of the output, batch first.
    """
    # Imported here: with a profile the kinds are known already.
    from fl_elastic.ops.lean_forward import has_foreign_forward, lean_forward, owns_weights

    kinds = (
        (nn.Conv2d, "Convolution", LeanKind.CONVOLUTION, (4,)),
        (nn.BatchNorm1d, "BatchNorm", LeanKind.NORM, (2, 3)),
        (nn.BatchNorm2d, "BatchNorm", LeanKind.NORM, (4,)),
        (nn.BatchNorm3d, "BatchNorm", LeanKind.NORM, (5,)),
        (nn.ReLU, "Relu", LeanKind.GATE, None),
        (nn.ReLU6, "Hardtanh", LeanKind.GATE, None),
        (nn.MaxPool2d, "MaxPool2D", LeanKind.POOL, (4,)),
    )
    if has_foreign_forward(module) or torch.is_autocast_enabled("cpu"):
        return LeanKind.NONE
    found = LeanKind.NONE
    # An in-place operation on a view, as after an InstanceNorm, gets a node of another name.
    in_view = node.startswith("AsStrided") and bool(getattr(module, "inplace", False))
    for kind, name, replacement, dimensions in kinds:
        if isinstance(module, kind) and (in_view or name in node):
            found = replacement if dimensions is None or len(shape) in dimensions else found
    if found is LeanKind.NORM:
        # A frozen norm runs in eval mode, where it needs running statistics.
        plain = type(module).forward is BatchNorm.forward and owns_weights(module)
        # A norm without parameters has none to freeze: it stays in its present mode.
        stays = module.training and own_parameters(module).get("weight") is None
        return found if plain and not stays and module.running_mean is not None else LeanKind.NONE
    if found is LeanKind.NONE or lean_forward(module, Mode.FROZEN) is None:
        return LeanKind.NONE
    return found


def lean_kinds(graph: BackwardGraph, model: nn.Module) -> NDArray[np.float64]:
    """Return the kind of operation by which each node may keep less, shape (M,): values of `LeanKind`.

    The lean layers apply the same test; a node of kind `LeanKind.NONE` runs as in torch.
    """
    kinds = np.zeros(len(graph.nodes))
    for index, node in enumerate(graph.nodes):
        if node.group is not None and node.name.startswith(_PRODUCTS):
            kinds[index] = LeanKind.PRODUCT
        elif node.module and node.shape:
            kinds[index] = lean_kind(model.get_submodule(node.module), node.name, node.shape)
    return kinds


def convolution_module(graph: BackwardGraph, model: nn.Module, group: int) -> nn.Conv2d | None:
    """Return the convolution that owns a group; None for another operation, or a layer used twice."""
    from fl_elastic.ops.lean_forward import owns_weights

    owners = graph.group_nodes()[group]
    if graph.groups[group].kind is not GroupKind.CONV or len(owners) != 1:
        return None
    name = graph.nodes[owners[0]].module
    module = model.get_submodule(name) if name else None
    whole = {f"{name}.{p}" for p, _ in module.named_parameters()} if module is not None else set()
    if isinstance(module, nn.Conv2d) and owns_weights(module):
        return module if whole == set(graph.groups[group].parameters) else None
    return None
