"""What the fleet's cut means to a learner from a stream: what is the federation's, and whether its features are."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import StreamError
from fl_elastic.flower.instructions import Instructions
from fl_elastic.groups.graph import BackwardGraph
from fl_elastic.streaming.joining import Layout
from fl_elastic.streaming.latent import UpperPart

__all__ = ["below_cut", "refuse_other_features"]

_WAYS = "start the learner without latent replay to take part"


def below_cut(graph: BackwardGraph, cut: str, names: tuple[str, ...], layout: Layout) -> set[str]:
    """Return the tensors below the fleet's cut, which are the federation's on every device.

    Parameters
    ----------
    graph : BackwardGraph
        Of a step of the model.
    cut : str
        The deepest group that anybody trains.
    names : tuple of str
        Of the model's tensors.
    layout : Layout
        Tells which are running statistics: those of layers above the cut are the device's own.

    Raises
    ------
    PlanError
        If the model has no group at the cut.
    """
    above = {name for group in graph.groups[: graph.groups_above(cut)] for name in group.parameters}
    layers = {name.rpartition(".")[0] for name in above}
    own = {name for name in layout.statistics if name.rpartition(".")[0] in layers}
    return {*names} - above - own


def refuse_other_features(
    upper: UpperPart,
    told: Instructions,
    sent: Mapping[str, NDArray[np.generic]],
    saved: Mapping[str, NDArray[np.generic]],
) -> None:
    """Raise StreamError if a round is of another model than the features that a learner keeps, or would change it.

    Parameters
    ----------
    upper : UpperPart
        What the learner trains.
    told : Instructions
        Of the round.
    sent, saved : mapping of str to array
        The server's model, and the learner's.
    """
    if not (told.cut or told.round_zero or told.cut_worth):
        raise StreamError(
            f"the learner keeps features at {upper.place!r}, which rounds without a cut would change: give the "
            f"fleet a cut there, or {_WAYS}"
        )
    if told.cut and any(name.startswith(f"{told.cut}.") for name in upper.frozen):
        raise StreamError(
            f"the fleet trains down to {told.cut!r}, and the learner keeps features at {upper.place!r}, above it: "
            f"{_WAYS}, or with more groups above its frozen part"
        )
    for name in upper.frozen:
        if not np.array_equal(sent[name], saved[name]):
            raise StreamError(
                f"the server's model is another one below {upper.place!r}, where the learner keeps features: "
                f"{name!r} differs. Start the learner from the server's model, or {_WAYS}"
            )
