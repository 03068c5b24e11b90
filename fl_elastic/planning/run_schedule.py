"""Cost of a run of many rounds with kept features, for each place where the fleet's cut may lie."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.memory import mask_bytes
from fl_elastic.profiling.prefix import StoreTerms, elastic_forward, feature_shape
from fl_elastic.profiling.profile import trainable_part

_STORED_BYTES = 2


@dataclass(frozen=True)
class RunLength:
    """How much one device trains in a run, and how many features it may keep.

    Attributes
    ----------
    rounds, epochs : int
        Rounds, and passes over the device's examples in each.
    examples : int
        Number of different examples of the device.
    feature_bytes : int
        Bound of its feature store, which holds 2 bytes per number; 0 for none.
    """

    rounds: int
    epochs: int
    examples: int
    feature_bytes: int


@dataclass(frozen=True)
class RunAtCut:
    """Costs of a run with the cut at one place.

    Attributes
    ----------
    deepest_group : str
        The deepest tensor group that is trained: what ``RoundConfig(cut="fixed:...")`` takes.
    trained_share : float
        Share of the model's weights that lie above the cut.
    step_bytes : float
        Memory of a step that trains all groups above the cut.
    feature_bytes : float
        Bytes of the kept features.
    first_pass_seconds : float
        Time to compute the kept features: once, and again whenever the cut returns to this place or a client has
        trained below it.
    step_seconds : float
        Time of a later step: look-up, computing the features that could not be kept, and training above the cut.
    seconds : float
        Time of the whole run.
    pays_after : int or None
        Number of rounds after which the run is ahead of one that trains everything; None if it never is.
    """

    deepest_group: str
    trained_share: float
    step_bytes: float
    feature_bytes: float
    first_pass_seconds: float
    step_seconds: float
    seconds: float
    pays_after: int | None


def run_schedule(profile: CostProfile, length: RunLength) -> list[RunAtCut]:
    """Return the costs of a run for each place of the cut, nearest to the loss first.

    The last entry trains everything. All groups above the cut are trained, in the same number of steps everywhere.

    Parameters
    ----------
    profile : CostProfile
        Costs of the whole model, including its frozen prefixes (`fl_elastic.profiling.prefix.measure_prefix`).
    length : RunLength
        Length of the run.
    """
    graph = profile.graph
    places = {cut.groups_above: index for index, cut in enumerate(graph.cuts)}
    return [
        _at_cut(profile, length, above, places.get(above))
        for above in sorted({*places, len(graph.groups)})
        if above
    ]


def _at_cut(profile: CostProfile, length: RunLength, above: int, place: int | None) -> RunAtCut:
    groups = profile.graph.groups
    batch = profile.key.rows
    steps = length.epochs * math.ceil(length.examples / batch)
    full = profile.full_step_seconds
    first_pass = kept = 0.0
    part = profile
    if place is not None and above < len(groups) and len(profile.cut_inference_seconds):
        values = math.prod(feature_shape(profile.graph, place))
        # Counted for infinitely many epochs, because kept features are not computed again.
        store = StoreTerms(length.feature_bytes, _STORED_BYTES, length.examples, math.inf)
        missing = store.computed_share(values)
        inference = float(profile.cut_inference_seconds[place])
        first_pass = (1 - missing) * inference * length.examples / batch
        kept = (1 - missing) * _STORED_BYTES * values * length.examples
        part = trainable_part(elastic_forward(profile, store, at_least=above), above)
    step = part.full_step_seconds
    saved = steps * (full - step)
    weights = np.array(profile.parameter_bytes, float)
    trained = np.arange(len(groups)) < above
    return RunAtCut(
        deepest_group=groups[above - 1].name,
        trained_share=float(weights[trained].sum() / weights.sum()),
        step_bytes=mask_bytes(profile, trained),
        feature_bytes=kept,
        first_pass_seconds=first_pass,
        step_seconds=step,
        seconds=first_pass + length.rounds * steps * step,
        pays_after=max(math.ceil(first_pass / saved), 1) if saved > 0 else None,
    )
