"""Costs of the forward pass up to each cut: unchanged, and with the frozen prefix run as inference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from fl_elastic.errors import ModelError
from fl_elastic.groups import Batch
from fl_elastic.groups.batch import as_pair
from fl_elastic.groups.forward import call_model
from fl_elastic.groups.graph import BackwardGraph
from fl_elastic.groups.untouched import untouched
from fl_elastic.profiling.clock import Clock
from fl_elastic.profiling.profile import CostProfile, Seconds

_REPEATS = 3
_VALUES = 1 << 19


@dataclass(frozen=True)
class StoreTerms:
    """Size and use of a feature store, from which its average cost per step is computed.

    Attributes
    ----------
    limit_bytes : int
        Bound of the store.
    value_bytes : int
        Bytes per stored number.
    examples : int
        Number of different examples in one epoch.
    epochs : float
        Number of epochs for which one prefix stays frozen.
    """

    limit_bytes: int
    value_bytes: int
    examples: int
    epochs: float

    def computed_share(self, values: int) -> float:
        """Return the share of examples, over all steps, whose prefix must be computed.

        An example that fits into the store is computed once; one that does not fit is computed in every epoch.

        Examples
        --------
        >>> StoreTerms(limit_bytes=1000, value_bytes=2, examples=10, epochs=4).computed_share(values=50)
        0.25
        >>> StoreTerms(limit_bytes=500, value_bytes=2, examples=10, epochs=4).computed_share(values=50)
        0.625
        """
        fitting = min(1.0, self.limit_bytes / (self.value_bytes * values * max(self.examples, 1)))
        return 1.0 - fitting * (1.0 - 1.0 / max(self.epochs, 1.0))


def feature_shape(graph: BackwardGraph, cut_index: int) -> tuple[int, ...]:
    """Return the shape of one example's features at a cut."""
    return graph.nodes[graph.cuts[cut_index].node].shape[1:]


def elastic_forward(
    profile: CostProfile, store: StoreTerms | None = None, *, at_least: int = 0
) -> CostProfile:
    """Return the profile of steps whose frozen prefix runs as inference, with a feature store if there is one.

    At each depth the forward cost of the prefix below the nearest cut is replaced by the cost of inference for the
    examples that must be computed, plus that of the look-up. This is an average over the epochs: the first epoch,
    which fills the store, costs more than the others. The cut lies below at least ``at_least`` groups, even for a
    shallower depth.
    """
    forward = profile.forward_seconds.copy()
    for depth in range(len(forward)):
        place = _place_of_cut(profile, depth, at_least)
        if place is not None:
            saving = profile.cut_plain_seconds[place] - _prefix_seconds(profile, place, store)
            forward[depth] = max(forward[depth] - saving, 1e-9)
    return replace(profile, forward_seconds=forward)


def prefix_seconds(
    profile: CostProfile, depth: int, store: StoreTerms | None = None, *, at_least: int = 0
) -> float:
    """Return the average cost per step of the frozen prefix, as `elastic_forward` prices it; 0 without a cut."""
    place = _place_of_cut(profile, depth, at_least)
    return 0.0 if place is None else _prefix_seconds(profile, place, store)


def _place_of_cut(profile: CostProfile, depth: int, at_least: int) -> int | None:
    """Return the index of the cut below a depth; None if there is none or its cost was not measured."""
    cut = profile.graph.cut_below(max(depth, at_least - 1))
    measured = len(profile.cut_plain_seconds) > 0
    return profile.graph.cuts.index(cut) if cut is not None and measured else None


def _prefix_seconds(profile: CostProfile, index: int, store: StoreTerms | None) -> float:
    inference = float(profile.cut_inference_seconds[index])
    if store is None:
        return inference
    values = math.prod(feature_shape(profile.graph, index))
    batch = profile.graph.nodes[profile.graph.cuts[index].node].shape[0]
    share = store.computed_share(values)
    reading = profile.lookup_seconds + profile.lookup_seconds_per_value * values * batch
    # If look-up costs more than computing, the store is not used, and the cost is that of computing.
    return min(share * inference + reading, inference)


def measure_prefix(
    profile: CostProfile,
    model: nn.Module,
    batch: Batch,
    timer: Clock,
    *,
    repeats: int = _REPEATS + 1,
) -> CostProfile:
    """Return the profile with the costs of an elastic forward pass; the model is left unchanged.

    One pass gives the seconds up to every cut, because the clock is read at each cut. Plain and inference passes of
    the frozen model alternate; the fastest of each counts (without the first, if there are several), and both are
    scaled to the forward pass of real steps.
    """
    # Imported here: not needed if costs are known already.
    from fl_elastic.ops.split import SplitModel

    graph, inputs = profile.graph, as_pair(batch)[0]
    looking_up, per_value = _lookup_seconds(inputs, timer)
    profile = replace(profile, lookup_seconds=looking_up, lookup_seconds_per_value=per_value)
    if not graph.cuts:
        return replace(profile, cut_plain_seconds=np.zeros(0), cut_inference_seconds=np.zeros(0))
    fastest = np.full((2, len(graph.cuts) + 1), np.inf)
    with untouched(model), torch.no_grad():
        model.eval()
        for repeat in range(repeats):
            plain = _seconds_at_cuts(model, graph, lambda: call_model(model, inputs), timer)
            with SplitModel(model, graph, graph.cuts[0]) as split:
                inference = _seconds_at_cuts(model, graph, lambda: split.features(inputs), timer)
            if repeat or repeats == 1:
                fastest = np.minimum(fastest, [plain, inference])
    scale = min(1.0, float(profile.forward_seconds[0]) / max(fastest[0, -1], 1e-12))
    seconds = np.maximum(fastest[:, :-1] * scale, 0.0)
    return replace(
        profile,
        cut_plain_seconds=seconds[0],
        cut_inference_seconds=np.minimum(seconds[0], seconds[1]),
    )


def _seconds_at_cuts(
    model: nn.Module, graph: BackwardGraph, run: Callable[[], Any], timer: Clock
) -> Seconds:
    """Return the seconds up to each cut and, as the last entry, of the whole pass; shape (C + 1,)."""
    with _stamps(model, graph, timer) as stamps:
        started = timer()
        run()
        ended = timer()
    places = range(len(graph.cuts))
    return np.array([*(stamps.get(index, ended) for index in places), ended]) - started


@contextmanager
def _stamps(model: nn.Module, graph: BackwardGraph, timer: Clock) -> Iterator[dict[int, float]]:
    """Record the time at each cut; a cut whose module does not return normally has no time."""
    stamps: dict[int, float] = {}
    handles = []
    for index, cut in enumerate(graph.cuts):
        module = model.get_submodule(cut.module)

        def note(*_: Any, index: int = index) -> None:
            stamps.setdefault(index, timer())

        handles.append(
            module.register_forward_pre_hook(note)
            if cut.at_input
            else module.register_forward_hook(note)
        )
    try:
        yield stamps
    finally:
        for handle in handles:
            handle.remove()


def _lookup_seconds(inputs: Any, timer: Clock) -> tuple[float, float]:
    """Return the seconds to identify the examples of a batch, and to read one stored number."""
    # Imported here: not needed by a client that knows its costs.
    from fl_elastic.groups.sample_ids import sample_ids

    rows = torch.zeros(16, _VALUES // 16, dtype=torch.float16)
    places = torch.arange(16)
    identifying, reading = np.inf, np.inf
    for _ in range(_REPEATS):
        started = timer()
        with suppress(ModelError):
            # If examples cannot be identified, no features are kept, and this time is never charged.
            sample_ids(inputs)
        middle = timer()
        rows[places].float()
        identifying, reading = min(identifying, middle - started), min(reading, timer() - middle)
    return float(identifying), float(reading) / _VALUES
