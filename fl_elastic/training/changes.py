"""What a fit changed, tensor by tensor, and which part of each tensor it trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_elastic.errors import TrainingError
from fl_elastic.groups import Mode, TensorGroup
from fl_elastic.ops import ChannelSubset
from fl_elastic.planning import Plan
from fl_elastic.update import Manifest, weights_of
from fl_elastic.update.parts import Masks

__all__ = ["changes", "stepped", "trained_parts", "under_every_name"]

Weights = Mapping[str, NDArray[Any]]


def changes(
    model: nn.Module, manifest: Manifest, before: Weights, steps: Mapping[str, int]
) -> dict[str, NDArray[Any]]:
    """Return the change of each tensor that was trained for at least one step, in the order of the manifest.

    They are compared one at a time: a copy of all of them would take as much memory as what is trained.

    Raises
    ------
    TrainingError
        If such a tensor is no longer finite.
    """
    deltas = {}
    for name in manifest.names:
        if steps.get(name, 0) > 0:
            value = weights_of(model, manifest, {name})[name]
            deltas[name] = np.asarray(np.subtract(value, before[name], out=value))
            if not np.isfinite(deltas[name]).all():
                raise TrainingError(
                    f"tensor {name!r} is no longer finite after training: lower the learning rate"
                )
    return deltas


def stepped(plans: Sequence[tuple[int, Plan]], steps: int) -> tuple[tuple[int, Plan], ...]:
    """Return the plans by which at least one of a fit's steps was taken, each with its first step.

    Parameters
    ----------
    plans : sequence of (int, Plan)
        Every plan with the step at which it came into force.
    steps : int
        All steps of the fit.
    """
    ends = [*(at for at, _ in plans), steps]
    return tuple(
        each for each, (start, end) in zip(plans, pairwise(ends), strict=True) if end > start
    )


def trained_parts(plans: Iterable[Plan], model: nn.Module) -> dict[str, Masks]:
    """Return the trained part of each weight that no plan trained whole, as one mask per axis.

    A part is the union over the plans' channels, or the smallest rows and columns that hold it. A bias is trained
    whole, as its gradient needs no activations, so that every channel's is exact; but not by neurons.

    Examples
    --------
    >>> group = TensorGroup("0", ("0.weight", "0.bias"), ((2, 3), (2,)), "linear")
    >>> plan = Plan("test", (group,), (Mode.channels(1 / 3),), 1, 1, 1, 1, 1, channels={"0": (1,)})
    >>> trained_parts([plan], nn.Sequential(nn.Linear(3, 2)))
    {'0.weight': (None, array([False,  True, False]))}
    """
    sides: dict[str, tuple[NDArray[np.bool_], NDArray[np.bool_]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for plan in plans:
        for group, mode in zip(plan.groups, plan.modes, strict=True):
            for name in mode.trains(group):
                weight = model.get_parameter(name)
                rows, columns = _rows_and_columns(name, weight, plan, group, mode, model)
                before = sides.get(name)
                shapes[name] = tuple(weight.shape)
                sides[name] = (
                    (rows, columns) if before is None else (before[0] | rows, before[1] | columns)
                )
    found: dict[str, Masks] = {}
    for name, (rows, columns) in sides.items():
        if not (rows.all() and columns.all()):
            ends = tuple(None if side.all() else side for side in (rows, columns))
            found[name] = (*ends, *(None,) * len(shapes[name]))[: len(shapes[name])]
    return found


def _rows_and_columns(
    name: str, weight: nn.Parameter, plan: Plan, group: TensorGroup, mode: Mode, model: nn.Module
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which indices of a weight's first and second axis a plan trains."""
    # A vector counts as one column.
    rows, columns = (np.zeros(length, dtype=np.bool_) for length in (*weight.shape, 1, 1)[:2])
    if group.name not in plan.channels or not mode.trains_part_of(weight.shape):
        return ~rows, ~columns
    if mode.axis == "neuron":
        rows[list(plan.channels[group.name])] = True
        return rows, ~columns
    layer = model.get_submodule(name.rpartition(".")[0])
    channels, groups = plan.channels[group.name], int(getattr(layer, "groups", 1))
    for block in ChannelSubset.of(channels, mode.axis, weight.shape, groups).blocks:
        rows[block.outputs] = True
        columns[block.columns] = True
    return rows, columns


def under_every_name(model: nn.Module, counts: Counter[str]) -> Counter[str]:
    """Return the counts of first names for every name of a tied tensor, or of a layer used twice.

    Examples
    --------
    >>> layer = nn.Linear(2, 2, bias=False)
    >>> sorted(under_every_name(nn.Sequential(layer, layer), Counter({"0.weight": 3})).items())
    [('0.weight', 3), ('1.weight', 3)]
    """
    first_name = {id(tensor): name for name, tensor in _named_tensors(model, repeat=False)}
    return Counter(
        {n: counts[first_name[id(tensor)]] for n, tensor in _named_tensors(model, repeat=True)}
    )


def _named_tensors(model: nn.Module, *, repeat: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers with their names; shared ones once, or under every name."""
    yield from model.named_parameters(remove_duplicate=not repeat)
    yield from model.named_buffers(remove_duplicate=not repeat)
