"""One round of training: the model that was sent, the replies that were merged, and its record."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Message, RecordDict
from numpy.typing import NDArray

from fl_elastic.aggregation import PartialMean, ServerOptimizer
from fl_elastic.errors import UpdateError
from fl_elastic.flower.downlink import MessagePacker
from fl_elastic.flower.fleet_cut import FrozenConsensus
from fl_elastic.update.frame import checksum
from fl_elastic.update.manifest import Role, WeightDict

_LOG = logging.getLogger("fl_elastic")
# Largest number of characters of a reason, and of nodes, in a log line.
_LONGEST, _NAMED = 500, 5


@dataclass(eq=False)
class Round:
    """State of one round of training while it lasts.

    Attributes
    ----------
    weights : dict of str to ndarray
        The model that clients start from.
    mean : PartialMean
        Merges the updates.
    packer : MessagePacker
        Has the messages that were sent.
    record : RoundRecord
        Record of the round, passed to ``on_round`` at the end.
    usable, failed : list of Message
        Replies that were merged, reduced to what the inner strategy needs, and errors.
    metrics : list of RecordDict
        Metrics of each usable reply.
    importance : list of dict
        Importance as reported by the clients, if it was asked for.
    losses : list of float
        Training losses of clients that started from the newest model.
    diverged : int
        Number of clients that could not train from it because their loss was not finite.
    stale : dict of int to str
        Nodes that need the whole model, and why.
    frozen_consensus : FrozenConsensus, optional
        Determines which parameters may be trained, if the fleet has a cut or a head that is solved for.
    """

    weights: WeightDict
    mean: PartialMean
    packer: MessagePacker
    record: RoundRecord
    usable: list[Message] = field(default_factory=list)
    failed: list[Message] = field(default_factory=list)
    metrics: list[RecordDict] = field(default_factory=list)
    importance: list[dict[str, float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    diverged: int = 0
    stale: dict[int, str] = field(default_factory=dict)
    frozen_consensus: FrozenConsensus | None = None

    def merged(self) -> WeightDict | None:
        """Return the merged model; None if the updates cannot be merged."""
        try:
            merged = self.mean.finish(self.weights)
            self.record.stayed = dict(self.mean.stayed)
            return merged
        except UpdateError as error:
            self._unchanged(error)
            return None

    def stepped(self, merged: WeightDict, optimizer: ServerOptimizer | None) -> WeightDict | None:
        """Return the merged model after the server optimiser's step, if there is one; None if it cannot step."""
        if optimizer is None:
            return merged
        roles = self.mean.manifest.role
        touched = {name for name in self.mean.touched if roles(name) is Role.PARAMETER}
        try:
            return optimizer.step(self.weights, merged, touched)
        except UpdateError as error:
            self._unchanged(error)
            return None

    def shortened(self, merged: WeightDict, stepped: WeightDict, limit: float) -> WeightDict:
        """Return the model after the server's step, shortened to ``limit`` times the norm of the clients' change.

        Parameters
        ----------
        merged, stepped : dict of str to ndarray
            The model after the clients' updates, and after the server's step.
        limit : float
            Bound on the norm of the parameters' change, relative to the clients' change; infinite for none.
        """
        if math.isinf(limit):
            return stepped
        base, manifest = self.weights, self.mean.manifest
        names = [name for name in manifest.names if manifest.role(name) is Role.PARAMETER]
        clients_norm, step_norm = (
            math.sqrt(sum(_square(each[name], base[name]) for name in names))
            for each in (merged, stepped)
        )
        if step_norm <= limit * clients_norm * (1 + 1e-6):
            return stepped
        share = limit * clients_norm / step_norm
        shorter = {
            name: np.asarray(
                base[name] + share * (np.asarray(stepped[name], np.float64) - base[name]),
                manifest.array_dtype(name),
            )
            for name in names
        }
        return {**stepped, **shorter}

    def _unchanged(self, error: UpdateError) -> None:
        _LOG.warning("round %s changes nothing: %s", self.record.server_round, one_line(str(error)))


def _square(one: NDArray[Any], other: NDArray[Any]) -> float:
    return float(np.square(np.asarray(one, np.float64) - other).sum())


@dataclass(frozen=True)
class AcceptedReply:
    """One client's merged update.

    Attributes
    ----------
    node_id : int
        The client's node.
    steps : dict of str to int
        Number of local steps in which each tensor was trained.
    num_examples : int
        Weight of the client.
    uplink_bytes : int
        Size of the packed update.
    metrics : dict
        The client's metrics.
    downlink_bytes : int
        Bytes sent to the client in this round; 0 for a late update.
    staleness : int
        By how many rounds the update is late.
    """

    node_id: int
    steps: dict[str, int]
    num_examples: int
    uplink_bytes: int
    metrics: dict[str, Any]
    downlink_bytes: int = 0
    staleness: int = 0


@dataclass(frozen=True)
class Rejection:
    """A reply that was not merged, and why."""

    server_round: int
    node_id: int
    reason: str


@dataclass
class RoundRecord:
    """Record of one round: which clients were asked, which answered, and what the server did.

    Attributes
    ----------
    server_round : int
        Number of the round.
    deadline : float, optional
        Seconds that clients were given.
    downlink_bytes : int
        Size of the whole model as it is sent.
    downlink_total_bytes : int
        Size of all training messages together.
    accepted, rejected : list
        Replies that were merged, in this order, and replies that were left out.
    stayed : dict of str to int
        Tensors that too few clients trained for a robust rule, and how many did.
    shortened : dict of int to int
        Nodes whose changes were shortened because they are many times larger than usual, and the number of tensors
        concerned.
    trains : bool
        Whether clients trained; False if they sent sums for a head in closed form or squared gradients, or rated
        cuts.
    stepped_back : str
        Why the round's updates were dropped and the previous model was restored; empty if that did not happen.
    cut : str
        The deepest group that was trained; empty for no cut.
    dampened : int
        Number of weights made smaller to forget a client's examples.
    asked : tuple of int
        Nodes that were asked to train.
    head_features : int
        Number of features of the head that was solved for; 0 if none was.
    head_penalty : float
        Penalty of that head; NaN without one.
    ranked_features : int
        Total number of features at the candidate places of the head; 0 if there was no choice.
    """

    server_round: int
    deadline: float | None = None
    downlink_bytes: int = 0
    downlink_total_bytes: int = 0
    accepted: list[AcceptedReply] = field(default_factory=list)
    rejected: list[Rejection] = field(default_factory=list)
    stayed: dict[str, int] = field(default_factory=dict)
    shortened: dict[int, int] = field(default_factory=dict)
    trains: bool = True
    stepped_back: str = ""
    cut: str = ""
    dampened: int = 0
    asked: tuple[int, ...] = ()
    head_features: int = 0
    head_penalty: float = float("nan")
    ranked_features: int = 0

    @property
    def silent(self) -> list[int]:
        """Nodes that were asked to train but did not answer before the round ended."""
        came = {reply.node_id for reply in self.accepted if not reply.staleness}
        came |= {
            rejection.node_id
            for rejection in self.rejected
            if rejection.server_round == self.server_round
        }
        return [node for node in self.asked if node not in came]

    @property
    def availability(self) -> str:
        """Text for the log: how many nodes were asked, and how many answered.

        >>> record = RoundRecord(3, asked=(1, 2, 3))
        >>> record.accepted.append(AcceptedReply(2, {}, 8, 100, {}))
        >>> record.availability
        '3 asked, 1 merged, 0 refused, 2 did not answer in time (nodes 1, 3)'
        """
        late = sum(reply.staleness > 0 for reply in self.accepted)
        said = [f"{len(self.asked)} asked", f"{len(self.accepted) - late} merged"]
        said += [f"{late} late ones merged"] if late else []
        said.append(f"{len(self.rejected)} refused")
        silent = self.silent
        if silent:
            some = ", ".join(map(str, silent[:_NAMED])) + (", ..." if silent[_NAMED:] else "")
            said.append(f"{len(silent)} did not answer in time (nodes {some})")
        return ", ".join(said)

    def leave_out(self, node: int, reason: str, what: str) -> None:
        """Log a reply that is left out, as in ``round zero: node 3 is left out: REASON``, and record it."""
        reason = one_line(reason)
        _LOG.warning("%s: node %s is left out: %s", what, node, reason)
        self.rejected.append(Rejection(self.server_round, node, reason))


def log_record(record: RoundRecord, rule: str) -> None:
    """Log which clients were asked and which answered, and which updates of the round were not used as sent."""
    number = record.server_round
    _LOG.info("round %s: %s", number, record.availability)
    if record.stayed:
        some = " ".join(", ".join(list(record.stayed)[:3]).split())
        _LOG.warning(
            "round %s: %s tensors stay as they are: too few clients trained them for rule %r: %s",
            number, len(record.stayed), rule, some,
        )  # fmt: skip
    if record.shortened:
        nodes = ", ".join(map(str, list(record.shortened)[:5]))
        _LOG.warning(
            "round %s: changes by node %s were many times larger than usual and were shortened",
            number,
            nodes,
        )
    if record.stepped_back:
        _LOG.warning(
            "round %s: %s: the model before the last round is put back, and from now on a step of the server is no "
            "longer than the clients' merged change",
            number, record.stepped_back,
        )  # fmt: skip


def in_fixed_order(replies: Iterable[Message]) -> list[Message]:
    """Sort replies by content, so that floating-point sums do not depend on the order of arrival."""

    def key(message: Message) -> tuple[bytes, str]:
        if message.has_error():
            return b"", ""
        content = message.content
        arrays = [array for record in content.array_records.values() for array in record.values()]
        # Metrics and configs decide for evaluations, which have no arrays, and for equal updates.
        others = [*content.metric_records.items(), *content.config_records.items()]
        return b"".join(checksum(b"", array.data) for array in arrays), str(others)

    return sorted(replies, key=key)


def one_line(reason: str) -> str:
    """Shorten a client's text to one line, so that it can neither flood nor forge the log.

    >>> one_line("no" + chr(10) + "memory")
    'no memory'
    """
    words = " ".join(reason.split())
    return words if len(words) <= _LONGEST else f"{words[:_LONGEST]}..."
