"""Round zero: before any training step, clients send sums and the server solves for the model's head from them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from flwr.app import Message
from numpy.typing import NDArray

from fl_elastic.claims import FEWEST, may_lie
from fl_elastic.closed_form.head import ClosedFormHead, as_scores, best_ridge
from fl_elastic.closed_form.head_sums import HeadSums
from fl_elastic.closed_form.head_sums_wire import decode_head_sums
from fl_elastic.closed_form.ridge import RidgeSystem
from fl_elastic.closed_form.trusted_sums import harmful, sizes_of_features
from fl_elastic.errors import UpdateError
from fl_elastic.flower.round import AcceptedReply, RoundRecord
from fl_elastic.flower.tasks.task import of_most, read_answers
from fl_elastic.update.checks import Limits
from fl_elastic.update.manifest import Manifest

_LOG = logging.getLogger("fl_elastic")
# A client's sums are left out if the mean square of its features is larger, or smaller, than the median by the
# first factor. Examples with features far from the others' get less weight, so that each counts as at most the
# second number of usual examples.
_UNUSUAL, _LARGER = 10.0, 3.0
# The examples of another round's clients may be a little harder to predict, so an error may grow by this factor,
# and by this share of the error of predicting the mean.
_SPOILED, _SLACK = 1.25, 0.02


@dataclass(frozen=True, eq=False)
class _Sent:
    node: int
    sums: HeadSums
    reply: AcceptedReply
    # Number of all examples of the client; for lack of time its sums may cover only some of them.
    examples: int

    @property
    def power(self) -> float:
        """Mean square of an example's features."""
        return float(self.sums.diagonal[:-1].sum()) / self.sums.num_examples


@dataclass(frozen=True, eq=False)
class Solved:
    """A model with a head in closed form: its layer, error and penalty, and the nodes whose sums were used.

    The error is measured on held-out examples. If no client sent sums, ``layer`` is empty, and error and penalty
    are NaN.
    """

    weights: dict[str, NDArray[Any]]
    layer: str = ""
    error: float = float("nan")
    nodes: frozenset[int] = frozenset()
    features: int = 0
    penalty: float = float("nan")

    @classmethod
    def with_head(
        cls,
        weights: Mapping[str, NDArray[Any]],
        manifest: Manifest,
        weight: str,
        head: ClosedFormHead,
        nodes: frozenset[int],
    ) -> Solved:
        """Return a model with this head in the layer whose weight has this name."""
        solved = dict(weights)
        kind, shape = manifest.array_dtype(weight), manifest.shape(weight)
        solved[weight] = head.weight.astype(kind).reshape(shape)
        if bias := bias_beside(weight, manifest):
            solved[bias] = head.bias.astype(manifest.array_dtype(bias))
        layer = weight.removesuffix("weight").removesuffix(".")
        return cls(solved, layer, head.error, nodes, head.weight.shape[1], head.penalty)


def bias_beside(weight: str, manifest: Manifest) -> str:
    """Return the name of the bias of the layer that has this weight; empty if the layer has none."""
    bias = weight.removesuffix("weight") + "bias"
    fits = bias in manifest.index and manifest.shape(bias) == manifest.shape(weight)[:1]
    return bias if fits else ""


@dataclass(frozen=True, eq=False)
class HeadCheckpointState:
    """State of a `HeadCheckpoint`: the model, its head's nodes, and the least error of a head so far."""

    weights: dict[str, NDArray[Any]]
    least_error: float
    nodes: frozenset[int]


class HeadCheckpoint:
    """The model right after the last solve of its head; this is the model that a run tests and returns.

    Between solves the head is frozen while the features train. If training made the next solved head worse, as with
    a learning rate that suits a random head, the model of the previous solve is restored.

    Parameters
    ----------
    snapshot : callable, optional
        Returns a function that restores the state which a round changes besides the model, such as a server
        optimiser's moments.

    Attributes
    ----------
    weights : dict of str to array
        The model; empty until a head was solved for.
    nodes : frozenset of int
        Nodes whose sums its head was solved from.
    went_back : bool
        Whether the last call of `take` restored an earlier model.
    """

    def __init__(self, snapshot: Callable[[], Callable[[], None]] = lambda: lambda: None) -> None:
        self.weights: dict[str, NDArray[Any]] = {}
        self.nodes: frozenset[int] = frozenset()
        self.went_back = False
        self._least = float("inf")
        self._snapshot = snapshot
        self._undo: Callable[[], None] = lambda: None

    def take(
        self,
        solved: Solved,
        *,
        anyway: bool = False,
        before: Callable[[], Solved] | None = None,
    ) -> str:
        """Store a newly solved model; return why the earlier one was restored instead, or an empty text.

        Parameters
        ----------
        solved : Solved
            The new model.
        anyway : bool
            Whether to store it even if its error is larger, for example because the earlier model was trained on
            examples that must be forgotten.
        before : callable, optional
            Returns the earlier model with a head solved for from the present clients; needed if some nodes of the
            old head are gone. Its error shows whether the features or only the examples have changed, and it is
            restored instead of the old head.
        """
        self.went_back, least = False, self._least
        if not anyway and self.weights and _spoiled(solved.error, least):
            old = before() if before is not None else None
            if old is not None and old.layer:
                least = old.error
            self.went_back = _spoiled(solved.error, least)
            if self.went_back:
                self._undo()
                self._undo = self._snapshot()
                if old is not None and old.layer:
                    self.weights, self.nodes, self._least = old.weights, old.nodes, least
                return (
                    f"the solved head's squared error is {solved.error:.2f} of the mean's, and was {least:.2f} "
                    "before: training spoils the features"
                )
        self._undo = self._snapshot()
        self._least = solved.error if anyway else min(least, solved.error)
        self.weights, self.nodes = solved.weights, solved.nodes
        return ""

    def to_state(self) -> HeadCheckpointState:
        """Return the state to be stored."""
        return HeadCheckpointState(self.weights, self._least, self.nodes)

    def restore(self, state: HeadCheckpointState) -> None:
        """Restore what `to_state` returned."""
        self.weights, self._least, self.nodes = state.weights, state.least_error, state.nodes


def _spoiled(error: float, least: float) -> bool:
    """Return whether a head's held-out error exceeds the least one so far by more than chance explains.

    An error of 1 is that of a head that predicts the mean. Near 1, the distances to 1 are compared instead.

    >>> _spoiled(0.45, 0.4), _spoiled(0.6, 0.4), _spoiled(0.99, 0.84), _spoiled(0.02, 0.01)
    (False, True, True, False)
    """
    return error > _SPOILED * least + _SLACK or _SPOILED * (1 - error) < 1 - least


def with_closed_form_head(
    replies: Iterable[Message],
    weights: Mapping[str, NDArray[Any]],
    manifest: Manifest,
    limits: Limits,
    record: RoundRecord,
    holds: Callable[[int, int | None], None],
) -> Solved:
    """Return the model with the head solved from the clients' sums; unchanged if no client sent sums.

    Sums are left out and logged if they are damaged, of another layer than most clients name, or of unusual size,
    or if they make the head worse on the held-out examples of the other clients.

    Parameters
    ----------
    replies : iterable of Message
        Replies to `fl_elastic.flower.tasks.solve_head.SolveHead`.
    weights : mapping of str to array
        The model.
    manifest : Manifest
        Manifest of the model.
    limits : Limits
        Bounds of the counts that the server believes.
    record : RoundRecord
        Record of the round; gets the clients whose sums were used, and those that were left out.
    holds : callable
        Called with each node and the version of the model that it reports to keep, if any.
    """
    left_out = partial(record.leave_out, what="round zero")
    found = sorted(_read(replies, manifest, limits, left_out, holds), key=lambda sent: sent.node)
    # Sorted by node, so that the same examples are held out together each time.
    found = of_most(
        found,
        lambda sent: (sent.sums.weight, sent.sums.classes),
        lambda sent: left_out(
            sent.node, f"sums for {sent.sums.weight!r}, not the layer of the others"
        ),
    )
    kept = _usual(found, left_out)
    if not kept:
        _LOG.warning("round zero: no client sent sums for a head; it stays as it is")
        return Solved(dict(weights))
    weight = kept[0].sums.weight
    try:
        kept, head = _solved(kept, bool(bias_beside(weight, manifest)), left_out)
    except UpdateError as error:
        _LOG.warning("round zero: %s; the head stays as it is", error)
        return Solved(dict(weights))
    record.accepted += [sent.reply for sent in kept]
    _LOG.info(
        "round zero: %s in closed form from %d examples of %d clients%s; its squared error is %.2f of the mean's",
        weight, sum(sent.sums.num_examples for sent in kept), len(kept), _classes_of(kept), head.error,
    )  # fmt: skip
    nodes = frozenset(sent.node for sent in kept)
    return Solved.with_head(weights, manifest, weight, head, nodes)


def _classes_of(kept: Sequence[_Sent]) -> str:
    """Return text on how many classes have examples; the head never predicts any other class."""
    if not kept[0].sums.classes:
        return ""
    counts = np.sum([sent.sums.targets[-1] for sent in kept], axis=0)
    return f", of {int((counts > 0).sum())} of {len(counts)} classes"


def _read(
    replies: Iterable[Message],
    manifest: Manifest,
    limits: Limits,
    left_out: Callable[[int, str], None],
    holds: Callable[[int, int | None], None],
) -> Iterable[_Sent]:
    for node, reply, sums in read_answers(
        replies, lambda reply: decode_head_sums(reply.packed, manifest, limits), left_out, holds
    ):
        whole = sums.num_examples <= reply.num_examples <= limits.max_examples
        yield _Sent(
            node, sums, AcceptedReply(node, {}, sums.num_examples, len(reply.packed), reply.metrics),
            reply.num_examples if whole else sums.num_examples,
        )  # fmt: skip


def _usual(found: list[_Sent], left_out: Callable[[int, str], None]) -> list[_Sent]:
    """Return the sums of clients with features of a usual size, each weighted by the number of its examples.

    A client that summed only some of its examples is weighted by all of them. The weight is limited to the median
    number of examples, and is smaller for unusually large features. The weights add up to the number of examples
    that were summed.
    """
    kept, most = found, np.inf
    if len(found) >= FEWEST:
        power = median(sent.power for sent in found)
        most = median(sent.examples for sent in found)
        kept = []
        for sent in found:
            if power / _UNUSUAL <= sent.power <= power * _UNUSUAL:
                kept.append(sent)
            else:
                times = (sent.power / power) ** 0.5 if power > 0 else np.inf
                left_out(sent.node, f"its features are {times:.3g} times as large as usual")
    sizes = (
        sizes_of_features([sent.sums for sent in kept])
        if len(kept) >= FEWEST
        else np.ones(len(kept))
    )
    usual = _LARGER * float(np.median(sizes)) if kept else 1.0
    stands_for = [
        min(sent.examples, most) * (usual / size if size > usual else 1.0)
        for sent, size in zip(kept, sizes, strict=True)
    ]
    seen = sum(min(sent.sums.num_examples, most) for sent in kept)
    return [
        replace(sent, sums=sent.sums.times(each / sent.sums.num_examples * seen / sum(stands_for)))
        for each, sent in zip(stands_for, kept, strict=True)
    ]


def _solved(
    kept: list[_Sent], has_bias: bool, left_out: Callable[[int, str], None]
) -> tuple[list[_Sent], ClosedFormHead]:
    """Return the clients whose sums are used, and the head; leave out clients that make it worse for the others."""
    at_once = -(-may_lie(len(kept)) // 2)
    may_go = may_lie(len(kept)) if len(kept) >= FEWEST else 0
    while True:
        system = RidgeSystem.of([sent.sums for sent in kept], has_bias)
        ridge, error = best_ridge(system)
        worst = harmful(ridge)[: min(at_once, may_go)] if may_go else []
        if not worst:
            return kept, as_scores(system.total, *ridge.layer(), ridge.penalty, error)
        for place in worst:
            left_out(
                kept[place].node, "its sums make the head worse on held-out examples of the others"
            )
        kept = [sent for place, sent in enumerate(kept) if place not in worst]
        may_go -= len(worst)
