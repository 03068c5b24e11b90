"""Places of a model that a head may read: the ends of its blocks, the input, and random features of the input."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from fl_elastic.errors import ModelError, PlanError
from fl_elastic.groups.batch import as_pair, batch_size
from fl_elastic.groups.forward import Batch, is_sparse
from fl_elastic.groups.graph import BackwardGraph
from fl_elastic.groups.untouched import untouched
from fl_elastic.ops.inference import traced
from fl_elastic.readout.first_pass import FirstPass
from fl_elastic.readout.place import INPUT, MOST_FEATURES, Place
from fl_elastic.readout.poolings import pooling_for
from fl_elastic.readout.readout_module import reaching

_MODULES, _FEWEST = 10, 6
_GRIDS, _INPUT_GRIDS = (1, 2, 4, 8), (4, 8, 16, 32)
# The same sizes on every device, so that devices with small budgets share some places with the others.
_RANDOM = (128, 256, 512, 1024)


def candidate_places(
    model: nn.Module,
    batch: Batch,
    most_features: int = MOST_FEATURES,
    first: FirstPass | None = None,
    graph: BackwardGraph | None = None,
) -> tuple[Place, ...]:
    """Return places of a model that a head may read, from the input towards the output.

    They are about ten block outputs, each pooled on grids of 1, 2, 4 and 8; the input of the last layer; the
    model's input; and random features of the input. A block output is a single tensor on which alone the rest of
    the model depends. Equal models give equal places on every device.

    Parameters
    ----------
    model : nn.Module
        The model; it is not changed.
    batch : batch
        A batch, for the shapes.
    most_features : int
        Places with more features are left out.
    first : FirstPass, optional
        Result of a pass over the batch, if it is known.
    graph : BackwardGraph, optional
        Result of `fl_elastic.ops.inference.traced` on these few examples, if it is known.

    Examples
    --------
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    >>> found = candidate_places(model, (torch.zeros(5, 3, 8, 8), torch.zeros(5, dtype=torch.long)))
    >>> [str(place) for place in found if place.pooling != "random"]
    ['input@grid4', 'input@grid8', 'in:3@flat']
    """
    first = FirstPass.of(model, as_pair(batch)) if first is None else first
    few, last = first.few, "" if "+" in first.end.layer else first.end.layer
    ends = _block_ends(model, last, traced(model, few) if graph is None else graph)
    places = [Place(INPUT, "grid", size) for size in _INPUT_GRIDS]
    places += [Place(INPUT, "flat"), *(Place(INPUT, "random", size) for size in _RANDOM)]
    for module, at_input, shape in ends:
        tokens = _holds_tokens(model, shape)
        for size in _GRIDS if len(shape) > 1 else ():
            places.append(Place(module, "tokens" if tokens else "grid", size, at_input))
        if tokens:
            places.append(Place(module, "first", 0, at_input))
        places.append(Place(module, "flat", 0, at_input))
    places = list(dict.fromkeys(places))
    with untouched(model):
        model.eval()
        known = _features(model, places, few[0])
    # Places without one row per example are left out: their first axis is time steps, tokens or nodes.
    count = batch_size(few)
    known = {place: rows for place, rows in known.items() if len(rows) == count}
    # Of places with equal features, keep the last layer's input, or else the smallest grid.
    order = sorted(known, key=lambda place: (place.module != last, places.index(place)))
    kept: list[Place] = []
    for place in order:
        wide = known[place].shape[1]
        if 0 < wide <= most_features and not any(
            _equal(known[place], known[each]) for each in kept
        ):
            kept.append(place)
    return tuple(place for place in places if place in kept)


def _features(model: nn.Module, places: Iterable[Place], inputs: object) -> dict[Place, Tensor]:
    """Return the features at those places whose pooling suits the shape of the tensor there."""
    found: dict[Place, Tensor] = {}
    by_tensor: dict[tuple[str, bool], list[Place]] = {}
    for place in places:
        by_tensor.setdefault((place.module, place.at_input), []).append(place)
    at_input = by_tensor.pop((INPUT, False))
    with torch.no_grad():
        # Inputs may be objects whose tensors only the model can access.
        with suppress(ModelError):
            reaching(model, (Place(INPUT, "flat"),), inputs)
            by_tensor[INPUT, False] = at_input
        firsts = tuple(each[0] for each in by_tensor.values())
        tensors = reaching(model, firsts, inputs)
        for same, tensor in zip(by_tensor.values(), tensors, strict=True):
            # Skipped, because poolings of sparse tensors, if they work, depend on how torch was built.
            for place in () if is_sparse(tensor) else same:
                with suppress(PlanError, RuntimeError, IndexError):
                    found[place] = pooling_for(place, tensor)(tensor)
    return found


def _equal(one: Tensor, other: Tensor) -> bool:
    # A model may have parts of different precision.
    return one.shape == other.shape and torch.allclose(
        one.double(), other.double(), rtol=1e-4, atol=1e-6
    )


def _block_ends(
    model: nn.Module, last: str, graph: BackwardGraph
) -> list[tuple[str, bool, tuple[int, ...]]]:
    """Return block outputs (see `candidate_places`), and the input of the last linear layer.

    Each is given by a module, whether its input is read instead of its output, and the shape per example. They do
    not depend on which parameters are frozen.
    """
    ends = _spread(
        [
            (cut.module, cut.at_input, graph.nodes[cut.node].shape[1:])
            for cut in reversed(graph.cuts)
            # In the name of a place, plus joins several places.
            if len(graph.nodes[cut.node].shape) > 1 and "+" not in cut.module
        ]
    )
    if last:
        wide: Any = model.get_submodule(last).in_features
        ends.append((last, True, (wide,)))
    return ends


def _spread(
    ends: list[tuple[str, bool, tuple[int, ...]]],
) -> list[tuple[str, bool, tuple[int, ...]]]:
    """Return about ten of the ends, evenly spaced among the outermost modules, including the last one."""
    depth = 0
    while sum(name.count(".") <= depth for name, *_ in ends) < min(_FEWEST, len(ends)):
        depth += 1
    outer = [end for end in ends if end[0].count(".") <= depth or end is ends[-1]]
    count = min(_MODULES, len(outer))
    return [outer[round((number + 1) * len(outer) / count) - 1] for number in range(count)]


def _holds_tokens(model: nn.Module, shape: tuple[int, ...]) -> bool:
    """Return whether channels come last: a LayerNorm has this many, or (in 2D) the model has no Conv1d."""
    if len(shape) not in (2, 3):
        return False
    kinds = list(model.modules())
    normed = {tuple(kind.normalized_shape) for kind in kinds if isinstance(kind, nn.LayerNorm)}
    if shape[-1:] in normed and shape[-1] != shape[0]:
        return True
    return len(shape) == 2 and not any(isinstance(kind, nn.Conv1d) for kind in kinds)
