"""One round of training: the model that went out, the replies that were merged, and what comes of them."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message, RecordDict
from numpy.typing import NDArray

from fl_elastic.aggregation import PartialMean, ServerOptimizer
from fl_elastic.errors import UpdateError
from fl_elastic.flower.outbox import Outbox
from fl_elastic.flower.replies import one_line
from fl_elastic.flower.round_record import RoundRecord
from fl_elastic.update import Manifest
from fl_elastic.update.manifest import Role

__all__ = ["Round", "longest_step"]

_LOG = logging.getLogger("fl_elastic")
_Weights = dict[str, NDArray[Any]]


@dataclass(eq=False)
class Round:
    """What the strategy knows of one round of training while it lasts.

    Attributes
    ----------
    weights : dict of str to ndarray
        The model that clients start from.
    mean : PartialMean
        Merges updates.
    outbox : Outbox
        The messages that went out.
    record : RoundRecord
        What is handed to ``on_round`` in the end.
    usable, failed : list of Message
        Replies that were merged, with no more content than the inner strategy needs, and errors.
    metrics : list of RecordDict
        Metrics of each usable reply.
    importance : list of dict
        What clients said about importance, where anybody asked.
    losses : list of float
        Of training from the newest model.
    diverged : int
        Clients that could not train from it, as their loss was not finite.
    stale : dict of int to str
        Nodes that need the whole model, and why.
    """

    weights: _Weights
    mean: PartialMean
    outbox: Outbox
    record: RoundRecord
    usable: list[Message] = field(default_factory=list)
    failed: list[Message] = field(default_factory=list)
    metrics: list[RecordDict] = field(default_factory=list)
    importance: list[dict[str, float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    diverged: int = 0
    stale: dict[int, str] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """Its number, which is the version of the model that clients start from."""
        return self.record.server_round

    @property
    def manifest(self) -> Manifest:
        """Of the model."""
        return self.mean.manifest

    def merged(self) -> _Weights:
        """Return the merged model; the model as it was if the updates cannot be merged."""
        try:
            merged = self.mean.finish(self.weights)
            self.record.stayed = dict(self.mean.stayed)
            return merged
        except UpdateError as error:
            return self._unchanged(error)

    def stepped(self, merged: _Weights, optimizer: ServerOptimizer | None) -> _Weights:
        """Return the merged model after the server optimiser's step, if there is one."""
        if optimizer is None:
            return merged
        roles = self.manifest.role
        touched = {name for name in self.mean.touched if roles(name) is Role.PARAMETER}
        try:
            return optimizer.step(self.weights, merged, touched)
        except UpdateError as error:
            return self._unchanged(error)

    def _unchanged(self, error: UpdateError) -> _Weights:
        _LOG.warning("round %s changes nothing: %s", self.number, one_line(str(error)))
        return dict(self.weights)


def longest_step(
    limit: float, manifest: Manifest, *, relative: bool, extrapolate: bool
) -> float | None:
    """Return how many times as long as its clients' a round's step may be; None for any length.

    Parameters
    ----------
    limit : float
        What the fleet's losses admit.
    manifest : Manifest
        Of the model; one with running statistics goes no further than its clients did.
    relative : bool
        Whether the step goes by the change that the clients made.
    extrapolate : bool
        Whether the user wants it to go further in any case.
    """
    if relative and not extrapolate and Role.STATISTIC in manifest.roles:
        limit = min(limit, 1.0)
    return None if math.isinf(limit) else limit
