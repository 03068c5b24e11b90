"""Clients' requests to have examples forgotten, and how the server dampens the global model for them."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from flwr.app import Message
from numpy.typing import NDArray

from fl_elastic.claims import FEWEST
from fl_elastic.errors import UpdateError
from fl_elastic.flower.client_availability import Backoff
from fl_elastic.flower.round import AcceptedReply, RoundRecord, one_line
from fl_elastic.flower.tasks.task import of_most, read_answers
from fl_elastic.update.checks import Limits
from fl_elastic.update.dampening import SquaredGradients, dampening_factors, decode_squares
from fl_elastic.update.manifest import Manifest, WeightDict

_LOG = logging.getLogger("fl_elastic")
_REQUEST = re.compile(r"[0-9a-f]{16,64}")
_MOST_REMEMBERED = 10_000
# Squared gradients, and numbers of examples, above this multiple of the median are scaled down to it.
_UNUSUAL = 10.0
# Attempts per request: for each attempt all clients pass over all of their examples.
_ATTEMPTS = 3
_LONGEST_WAIT = 64
_SQUARES = "squares of gradients"
# A loss may double, and beyond that grow by this share of the median loss and by this constant.
_MARGIN, _CONSTANT = 0.1, 0.1


@dataclass(frozen=True)
class TriedRequests:
    """State of `ForgetRequests`.

    Attributes
    ----------
    rounds : dict of str to int
        By digest, the round after which a request was met; 0 if it cannot be met.
    failures : dict of str to int
        By digest, how often a client did not send the squared gradients that its request needs.
    waits : dict of int to (int, int)
        By node, how many of its requests were taken up, and the number of rounds until the next one may be.
    """

    rounds: dict[str, int]
    failures: dict[str, int]
    waits: dict[int, tuple[int, int]]


class ForgetRequests:
    """Which nodes want examples forgotten, and which of these requests were met.

    A request is a digest of the examples, which stay with the client. A request that was met, or cannot be met, is
    never taken up again. A request whose client did not send the squared gradients for it is tried a few times.
    Every request makes all clients pass over their data, so after each one a node has to wait twice as many rounds
    for its next.
    """

    def __init__(self) -> None:
        self._wants: dict[int, str] = {}
        # By node: when its next request may be taken up.
        self._waits: dict[int, Backoff] = {}
        # The round after which the model was dampened; 0 if that was undone or is impossible.
        self._tried: dict[str, int] = {}
        self._failures: Counter[str] = Counter()

    def hear(self, node: int, request: object) -> None:
        """Note a node's request; anything that is not a valid request counts as none."""
        self._wants.pop(node, None)
        if isinstance(request, str) and _REQUEST.fullmatch(request):
            self._wants[node] = request

    def open_of(self, nodes: Iterable[int]) -> dict[int, str]:
        """Return the untried requests of these nodes, except for nodes that have to wait."""
        wanted = {node: self._wants[node] for node in nodes if node in self._wants}
        return {
            node: request
            for node, request in wanted.items()
            if request not in self._tried and (node not in self._waits or self._waits[node].is_due)
        }

    def round_passed(self, nodes: Iterable[int], taken_up: Collection[int]) -> None:
        """Note a round of these nodes; nodes in ``taken_up`` had their request taken up after it."""
        for node in nodes:
            wait = self._waits.setdefault(node, Backoff(_LONGEST_WAIT, tolerance=1))
            if node in taken_up:
                wait.failed()
            else:
                wait.passed()

    def met_of(self, node: int) -> str:
        """Return the node's request for forgetting if the server has met it, else an empty text."""
        request = self._wants.get(node, "")
        return request if self._tried.get(request, 0) else ""

    def tried(self, requests: Mapping[int, str], server_round: int) -> None:
        """Note the round after which these requests were met; 0 for requests that cannot be met."""
        self._tried |= dict.fromkeys(requests.values(), server_round)
        while len(self._tried) > _MOST_REMEMBERED:
            self._tried.pop(next(iter(self._tried)))

    def failed(self, requests: Mapping[int, str]) -> None:
        """Note that clients did not send the squared gradients for their requests; a later round may try again."""
        self._failures.update(requests.values())
        self.tried(
            {n: request for n, request in requests.items() if self._failures[request] >= _ATTEMPTS},
            0,
        )

    def not_yet(self, server_round: int) -> None:
        """Note that requests of a round are not met yet, because no head was solved for without their examples."""
        self._tried = {
            request: number for request, number in self._tried.items() if number != server_round
        }

    def undone(self, server_round: int) -> None:
        """Note that the model before a round was restored, which undoes the requests met after that round."""
        undone = [request for request, number in self._tried.items() if number == server_round]
        if undone:
            self._tried |= dict.fromkeys(undone, 0)
            _LOG.warning(
                "%d requests to have examples forgotten were undone: the losses of the fleet jumped after them",
                len(undone),
            )

    def to_state(self) -> TriedRequests:
        """Return the state to be stored: which requests were tried, and how often. Nodes repeat their requests."""
        waits = {node: (backoff.attempts, backoff.left) for node, backoff in self._waits.items()}
        return TriedRequests(dict(self._tried), dict(self._failures), waits)

    def restore(self, state: TriedRequests) -> None:
        """Restore what `to_state` returned."""
        self._wants, self._tried = {}, dict(state.rounds)
        self._failures = Counter(state.failures)
        self._waits = {
            node: Backoff(_LONGEST_WAIT, 1, attempts, min(left, _LONGEST_WAIT))
            for node, (attempts, left) in state.waits.items()
        }


@dataclass(frozen=True, eq=False)
class _Sent:
    node: int
    everything: SquaredGradients
    forgotten: SquaredGradients | None
    reply: AcceptedReply


def dampened(
    replies: Iterable[Message],
    weights: Mapping[str, NDArray[Any]],
    manifest: Manifest,
    limits: Limits,
    record: RoundRecord,
    requests: Mapping[int, str],
    alpha: float | None,
) -> tuple[WeightDict, dict[int, int]]:
    """Return the dampened model, and for each node the number of its examples that were forgotten.

    Weights that matter to the forgotten examples are made smaller. A node's number is 0 if its examples are too
    many to forget; a node that did not send squared gradients for its request has no entry. Replies that are
    damaged, or of other parameters than most, are left out and logged. Sums far larger than usual are scaled down
    to a bound.

    Parameters
    ----------
    replies : iterable of Message
        Replies to `fl_elastic.flower.tasks.forgetting.SumSquaredGradients`.
    weights : mapping of str to array
        The model.
    manifest : Manifest
        Manifest of the model.
    limits : Limits
        Bounds of the counts that the server believes.
    record : RoundRecord
        Filled with who was counted, who was not, and how many weights were made smaller.
    requests : mapping of int to str
        Nodes whose examples may be forgotten, with their requests.
    alpha : float or None
        See `fl_elastic.update.dampening.dampening_factors`.
    """
    found = of_most(
        list(_read(replies, manifest, limits, record)),
        lambda sent: frozenset(sent.everything.sums),
        lambda sent: record.leave_out(
            sent.node, "they are of other parameters than those of most clients", _SQUARES
        ),
    )
    found = _usual(found)
    record.accepted += [sent.reply for sent in found]
    sent_by = {sent.node: sent.forgotten for sent in found if sent.node in requests}
    wanted = {node: each for node, each in sent_by.items() if each is not None}
    came = dict.fromkeys(wanted, 0)
    examples = sum(sent.everything.examples for sent in found)
    # Alpha is derived from the share of forgotten examples, so other examples have to remain.
    while (
        wanted and (alpha or 1.0) * sum(request.examples for request in wanted.values()) >= examples
    ):
        # A client that wants too much forgotten does not keep the others' examples from being forgotten.
        most = max(wanted, key=lambda node: (wanted[node].examples, node))
        _LOG.warning(
            "round %s: node %s wants %d of %d examples forgotten, too many to find the weights that matter to them",
            record.server_round, most, wanted.pop(most).examples, examples,
        )  # fmt: skip
    if not wanted:
        _LOG.warning("round %s: nothing can be forgotten: no request is left", record.server_round)
        return dict(weights), came
    try:
        everything = _added([sent.everything for sent in found])
        factors = dampening_factors(_added([*wanted.values()]), everything, alpha=alpha)
    except UpdateError as error:
        _LOG.warning(
            "round %s: nothing can be forgotten: %s", record.server_round, one_line(str(error))
        )
        return dict(weights), came
    came |= {node: request.examples for node, request in wanted.items()}
    record.dampened = sum(int((factor != 1.0).sum()) for factor in factors.values())
    _LOG.info(
        "round %s: %d examples of %d clients are forgotten: %d weights are smaller",
        record.server_round, sum(came.values()), len(wanted), record.dampened,
    )  # fmt: skip
    new = dict(weights)
    for name, factor in factors.items():
        # Multiplied in fp32 or higher precision, so that double-precision weights keep their digits.
        new[name] = np.asarray(weights[name] * factor, weights[name].dtype)
    return new, came


def why_not_kept(before: Mapping[int, float], after: Mapping[int, float]) -> str:
    """Return why a dampened model is not kept, if most clients report a far larger loss than before; else empty.

    Parameters
    ----------
    before, after : mapping of int to float
        Loss by node, of the nodes that reported it; infinite if it is not finite.

    Examples
    --------
    >>> why_not_kept({1: 0.5, 2: 0.4, 3: 0.6}, {1: 0.6, 2: 9.0, 3: 0.3})
    ''
    >>> why_not_kept({1: 0.5, 2: 0.4, 3: 0.6}, {1: 2.0, 2: 9.0, 3: 0.3})
    'the losses of 2 of 3 clients are far larger than before'
    """
    known = before.keys() & after.keys()
    usual = median(abs(before[node]) for node in known) if known else 0.0
    worse = [
        node
        for node in known
        if after[node] > before[node] + abs(before[node]) + _MARGIN * usual + _CONSTANT
    ]
    if 2 * len(worse) <= len(known):
        return ""
    return f"the losses of {len(worse)} of {len(known)} clients are far larger than before"


def _read(
    replies: Iterable[Message], manifest: Manifest, limits: Limits, record: RoundRecord
) -> Iterable[_Sent]:
    for node, reply, (everything, forgotten) in read_answers(
        replies,
        lambda reply: decode_squares(reply.packed, manifest, limits),
        partial(record.leave_out, what=_SQUARES),
    ):
        accepted = AcceptedReply(node, {}, everything.examples, len(reply.packed), reply.metrics)
        yield _Sent(node, everything, forgotten, accepted)


def _usual(found: list[_Sent]) -> list[_Sent]:
    """Return the replies, with sums and counts of each bounded by a multiple of the median."""
    if len(found) < FEWEST:
        return found
    size = _UNUSUAL * median(sent.everything.mean for sent in found)
    examples = _UNUSUAL * median(sent.everything.examples for sent in found)
    kept = []
    for sent in found:
        factor = min(1.0, size / sent.everything.mean) if sent.everything.mean > 0 else 1.0
        share = min(1.0, examples / sent.everything.examples)
        kept.append(
            replace(
                sent,
                everything=_bounded(sent.everything, factor, share),
                forgotten=None
                if sent.forgotten is None
                else _bounded(sent.forgotten, factor, share),
            )
        )
    return kept


def _bounded(squares: SquaredGradients, factor: float, share: float) -> SquaredGradients:
    """Return squares whose sums are scaled by ``factor * share``, and whose number of examples by ``share``."""
    if factor == share == 1.0:
        return squares
    return replace(squares.times(factor * share), examples=max(int(share * squares.examples), 1))


def _added(squares: list[SquaredGradients]) -> SquaredGradients:
    total = squares[0]
    for each in squares[1:]:
        total = total + each
    return total
