"""The interface of channel scores, their registry, and the choice of channels by them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import PlanError
from fl_elastic.groups import Mode, TensorGroup
from fl_elastic.groups.graph import BackwardGraph
from fl_elastic.planning.importance.base import Probe
from fl_elastic.registry import Factories


@dataclass(frozen=True, eq=False)
class ChannelScores:
    """Scores of the channels of one layer; larger means more worth training.

    Attributes
    ----------
    inputs : array or None, shape (C_in,)
        One finite number per input channel or feature; None if the layer's input has no gradient.
    outputs : array or None, shape (C_out,)
        One finite number per output channel or feature.
    """

    inputs: NDArray[np.float64] | None
    outputs: NDArray[np.float64] | None


class ChannelScore(ABC):
    """Scores the channels of convolutions and linear layers: larger means more worth training.

    Attributes
    ----------
    batches_needed : int
        Number of batches needed.
    by_example : bool
        Whether it passes each example through the model separately.
    """

    batches_needed: int = 0
    by_example: bool = False

    @abstractmethod
    def score(self, probe: Probe, graph: BackwardGraph) -> dict[str, ChannelScores]:
        """Return the scores of every ``Conv2d`` and ``Linear`` among the probe's groups, by group name.

        ``graph`` is the graph of a step of the probe's model. The probe is left unchanged.
        """

    def once(self, probe: Probe, graph: BackwardGraph) -> dict[str, ChannelScores]:
        """Return the result of `score`; with equal settings and the same probe it is computed only once."""
        options, scores = probe.found.get(type(self), (None, {}))
        if _equal(options, vars(self)):
            return dict(scores)
        scores = self.score(probe, graph)
        probe.found[type(self)] = dict(vars(self)), scores
        return scores


def _equal(one: object, other: object) -> bool:
    """Return whether two settings compare equal; False for arrays, whose comparison is not one bool."""
    try:
        return bool(one == other)
    except (ValueError, RuntimeError):
        return False


CHANNEL_SCORES: Factories[ChannelScore] = Factories(
    "channel score",
    modules=dict.fromkeys(("fisher", "l2"), "fl_elastic.planning.importance.channel_scores"),
)
"""Registry of channel scores by name."""


def choose_channels(
    modes: Sequence[Mode], graph: BackwardGraph, scores: Mapping[str, ChannelScores]
) -> dict[str, tuple[int, ...]]:
    """Return the channels with the largest scores for every group that is trained by channels.

    A depthwise layer has the same channels on both sides; its output scores count. Among channels with equal scores
    those with lower indices are taken.

    Parameters
    ----------
    modes : sequence of Mode
        Modes in backward order.
    graph : BackwardGraph
        The graph with the groups.
    scores : mapping of str to ChannelScores
        By group name, as a `ChannelScore` returns them.

    Returns
    -------
    dict of str to tuple of int
        Sorted channels by group name.

    Raises
    ------
    PlanError
        If such a group has no scores on the axis of its mode.

    Examples
    --------
    >>> group = TensorGroup("conv", ("conv.weight",), ((4, 3, 1, 1),), "conv")
    >>> scores = {"conv": ChannelScores(None, np.array([0.5, 2.0, 0.0, 1.0]))}
    >>> choose_channels([Mode.channels(1 / 2, "out")], BackwardGraph((group,), ()), scores)
    {'conv': (1, 3)}
    """
    chosen = {}
    for group, mode in zip(graph.groups, modes, strict=True):
        if mode.kind == "channels":
            worth = _on_axis(group, mode, scores)
            order = np.argsort(-worth, kind="stable")
            best = order[: mode.channel_count(len(worth))]
            chosen[group.name] = tuple(sorted(best.tolist()))
    return chosen


def _on_axis(
    group: TensorGroup, mode: Mode, scores: Mapping[str, ChannelScores]
) -> NDArray[np.float64]:
    found = scores.get(group.name)
    axis = "out" if found is not None and _is_depthwise(group, found) else mode.axis
    worth = None if found is None else found.inputs if axis == "in" else found.outputs
    if worth is None:
        raise PlanError(
            f"group {group.name!r} is to be trained by {mode}, but its {axis} channels have no scores: "
            "choose channels of two-dimensional convolutions and linear layers alone"
        )
    return worth


def _is_depthwise(group: TensorGroup, scores: ChannelScores) -> bool:
    alone = any(len(shape) == 4 and shape[1] == 1 for shape in group.shapes)
    return (
        alone
        and scores.outputs is not None
        and (scores.inputs is None or len(scores.inputs) == len(scores.outputs))
    )
