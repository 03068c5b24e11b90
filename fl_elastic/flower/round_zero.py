"""Round zero: before anybody takes a step, clients send sums and the server solves for the model's head."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from flwr.app import Message
from numpy.typing import NDArray

from fl_elastic.errors import UpdateError
from fl_elastic.flower.records import believed_metrics
from fl_elastic.flower.round import AcceptedReply, RoundRecord
from fl_elastic.flower.tasks.task import read_answers
from fl_elastic.update.closed_form import ClosedFormHead, as_scores, best_ridge
from fl_elastic.update.head_sums import HeadSums, decode_head_sums
from fl_elastic.update.manifest import Manifest
from fl_elastic.update.partial import Limits
from fl_elastic.update.ridge import RidgeSystem
from fl_elastic.update.trusted_sums import harmful, sizes_of_features

__all__ = ["HeadCheckpoint", "Solved", "bias_beside", "with_closed_form_head"]

_LOG = logging.getLogger("fl_elastic")
# Who has features so many times as large, or as small, as usual does not count; an example of one whose features
# lie further from the others' counts as less, so that it weighs as no more than so many usual ones.
_UNUSUAL, _LARGER = 10.0, 3.0
# Who is usual is known from so many on, of whom at most one of so many is left out for what its sums do to others.
_FEWEST, _LEFT_OUT = 3, 5
# Other clients' examples may be a little harder; of the mean's error so much is nothing.
_SPOILED, _NOTHING = 1.25, 0.02
# No tensor's name begins with a dot.
_ERROR, _NODES = ".error", ".nodes"


@dataclass(frozen=True, eq=False)
class _Sent:
    node: int
    sums: HeadSums
    reply: AcceptedReply
    # Of the client, who may have had the time for some of them only.
    examples: int

    @property
    def power(self) -> float:
        """Mean square of an example's features."""
        return float(np.trace(self.sums.products[:-1, :-1])) / self.sums.num_examples


@dataclass(frozen=True, eq=False)
class Solved:
    """The model with a head in closed form, the layer that it is, its error on what was held out, and whose it is.

    Without a layer, and of unknown error, where no client sent sums.
    """

    weights: dict[str, NDArray[Any]]
    layer: str = ""
    error: float = float("nan")
    nodes: frozenset[int] = frozenset()
    features: int = 0

    @classmethod
    def with_head(
        cls,
        weights: Mapping[str, NDArray[Any]],
        manifest: Manifest,
        weight: str,
        head: ClosedFormHead,
        nodes: frozenset[int],
    ) -> Solved:
        """Return a model with a head in the layer that has a weight of this name."""
        solved = dict(weights)
        kind, shape = manifest.array_dtype(weight), manifest.shape(weight)
        solved[weight] = head.weight.astype(kind).reshape(shape)
        if bias := bias_beside(weight, manifest):
            solved[bias] = head.bias.astype(manifest.array_dtype(bias))
        layer = weight.removesuffix("weight").removesuffix(".")
        return cls(solved, layer, head.error, nodes, head.weight.shape[1])


def bias_beside(weight: str, manifest: Manifest) -> str:
    """Return the name of the bias of the layer that has a weight of this name; empty if it has none."""
    bias = weight.removesuffix("weight") + "bias"
    fits = bias in manifest.index and manifest.shape(bias) == manifest.shape(weight)[:1]
    return bias if fits else ""


@dataclass(frozen=True, eq=False)
class HeadCheckpointState:
    """State of a `HeadCheckpoint`: the model, the least error of a head so far, and whose sums its head is from."""

    weights: dict[str, NDArray[Any]]
    least_error: float
    nodes: frozenset[int]

    def __post_init__(self) -> None:
        if not self.least_error >= 0:
            raise ValueError(f"an error of {self.least_error} is no state of a run")


class HeadCheckpoint:
    """The model as it was when its head was last solved for: what is tested and handed out.

    Until the next time the features move on under a head that stays. Where that made them worth less, as a learning
    rate does that suits a random head, the model of the time before is put back.

    Parameters
    ----------
    snapshot : callable, optional
        Returns what puts back whatever else a round changes, such as a server optimiser's moments.

    Attributes
    ----------
    weights : dict of str to array
        The model; empty as long as no head was solved for.
    nodes : frozenset of int
        Whose sums its head is from.
    went_back : bool
        Whether the last time a model was put back.
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
        """Take over a model; return why it was not, and the one before is put back; empty if it was.

        Parameters
        ----------
        solved : Solved
            The model as it is now.
        anyway : bool
            Take it whatever it is worth, as where it has forgotten examples that the one before knows.
        before : callable, optional
            Returns `weights` with a head solved for anew, where some of those are gone whose sums are in the old
            one: that head does not come back, and the new one's error tells whether features or examples changed.
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
        """Return what must be found again."""
        return HeadCheckpointState(self.weights, self._least, self.nodes)

    def restore(self, state: HeadCheckpointState) -> None:
        """Put back what `to_state` gave."""
        self.weights, self._least, self.nodes = state.weights, state.least_error, state.nodes


def _spoiled(error: float, least: float) -> bool:
    """Whether an error is so much more than the least, or explains so much less, that it is no accident.

    >>> _spoiled(0.45, 0.4), _spoiled(0.6, 0.4), _spoiled(0.99, 0.84), _spoiled(0.02, 0.01)
    (False, True, True, False)
    """
    return error > _SPOILED * least + _NOTHING or _SPOILED * (1 - error) < 1 - least


def with_closed_form_head(
    replies: Iterable[Message],
    weights: Mapping[str, NDArray[Any]],
    manifest: Manifest,
    limits: Limits,
    record: RoundRecord,
    holds: Callable[[int, int | None], None],
) -> Solved:
    """Return the model with the head that the clients' sums give; as it is, if no client could send any.

    What is damaged, of another layer than most name, far from what is usual, or makes the head worse on what the
    others hold out is left out and named in the log.

    Parameters
    ----------
    replies : iterable of Message
        To `fl_elastic.flower.tasks.solve_head.SolveHead`.
    weights : mapping of str to array
        The model.
    manifest : Manifest
        Of it.
    limits : Limits
        What counts the server believes.
    record : RoundRecord
        Of round zero: who was counted and who was not is entered into it.
    holds : callable
        Hears of each node which version of the model it says it keeps, if any.
    """
    left_out = partial(record.leave_out, what="round zero")
    found = sorted(_read(replies, manifest, limits, left_out, holds), key=lambda sent: sent.node)
    # In the order of nodes, so that the same examples are held out together each time.
    kept = _usual(_of_one_layer(found, left_out), left_out)
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
        "round zero: %s in closed form from %d examples of %d clients; its squared error is %.2f of the mean's",
        weight, sum(sent.sums.num_examples for sent in kept), len(kept), head.error,
    )  # fmt: skip
    nodes = frozenset(sent.node for sent in kept)
    return Solved.with_head(weights, manifest, weight, head, nodes)


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
        metrics = believed_metrics(reply.metrics)
        whole = sums.num_examples <= reply.num_examples <= limits.max_examples
        yield _Sent(
            node, sums, AcceptedReply(node, {}, sums.num_examples, len(reply.packed), metrics),
            reply.num_examples if whole else sums.num_examples,
        )  # fmt: skip


def _of_one_layer(found: list[_Sent], left_out: Callable[[int, str], None]) -> list[_Sent]:
    """Return the sums for the layer, and the kind of target, that most clients name."""
    kinds = Counter((sent.sums.weight, sent.sums.classes) for sent in found)
    most = max(kinds, key=lambda kind: kinds[kind], default=None)
    kept = []
    for sent in found:
        if (sent.sums.weight, sent.sums.classes) == most:
            kept.append(sent)
        else:
            left_out(sent.node, f"sums for {sent.sums.weight!r}, not the layer of the others")
    return kept


def _usual(found: list[_Sent], left_out: Callable[[int, str], None]) -> list[_Sent]:
    """Return the sums of clients like the others, each with the weight of all of its examples.

    Who had the time for some of its examples only stands for all of them, and nobody for more than is usual, in
    number and size. All together count as many examples as were seen.
    """
    kept, most = found, np.inf
    if len(found) >= _FEWEST:
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
        if len(kept) >= _FEWEST
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
    """Return the head, and whose sums it is from: not of those that make it worse for the others."""
    at_once = -(-len(kept) // (2 * _LEFT_OUT))
    may_go = -(-len(kept) // _LEFT_OUT) if len(kept) >= _FEWEST else 0
    while True:
        system = RidgeSystem.of([sent.sums for sent in kept], has_bias)
        ridge, error = best_ridge(system)
        worst = harmful(ridge)[: min(at_once, may_go)] if may_go else []
        if not worst:
            return kept, as_scores(system.total, *ridge.layer(), ridge.penalty, error)
        for place in worst:
            left_out(
                kept[place].node, "with its sums the head is worse on what the others hold out"
            )
        kept = [sent for place, sent in enumerate(kept) if place not in worst]
        may_go -= len(worst)
