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
from fl_elastic.flower.records import believed_metrics, read_train_reply
from fl_elastic.flower.round import AcceptedReply, RoundRecord
from fl_elastic.update.closed_form import closed_form_head
from fl_elastic.update.head_sums import HeadSums, decode_head_sums
from fl_elastic.update.manifest import Manifest
from fl_elastic.update.partial import Limits

__all__ = ["LastSolved", "Solved", "with_closed_form_head"]

_LOG = logging.getLogger("fl_elastic")
# A client counts as no more examples than so many times what is usual, and one whose features are so many times as
# large, or as small, as usual does not count.
_UNUSUAL = 10.0
# Who is usual is known from so many on.
_FEWEST = 3
# Other clients' examples may be a little harder; of the mean's error so much is nothing.
_SPOILED, _NOTHING = 1.25, 0.02
# No tensor's name begins with a dot.
_ERROR = ".error"


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
    """The model with a head in closed form, the layer that it is, and its error on new examples, as expected.

    Without a layer, and of unknown error, where no client sent sums.
    """

    weights: dict[str, NDArray[Any]]
    layer: str = ""
    error: float = float("nan")


class LastSolved:
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
    went_back : bool
        Whether the last time a model was put back.
    """

    def __init__(self, snapshot: Callable[[], Callable[[], None]] = lambda: lambda: None) -> None:
        self.weights: dict[str, NDArray[Any]] = {}
        self.went_back = False
        self._least = float("inf")
        self._snapshot = snapshot
        self._undo: Callable[[], None] = lambda: None

    def take(self, solved: Solved) -> str:
        """Take over a model; return why it was not, and the one before is put back; empty if it was."""
        self.went_back = _spoiled(solved.error, self._least) and bool(self.weights)
        if self.went_back:
            self._undo()
            self._undo = self._snapshot()
            return (
                f"the solved head's squared error is {solved.error:.2f} of the mean's, and was {self._least:.2f} "
                "before: training spoils the features"
            )
        self._undo = self._snapshot()
        self._least = min(self._least, solved.error)
        self.weights = solved.weights
        return ""

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return what must outlast a restart of the server."""
        return {**self.weights, _ERROR: np.array(self._least)} if self.weights else {}

    def from_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put back what `to_arrays` gave."""
        weights = dict(arrays)
        least = float(weights.pop(_ERROR, np.array(np.inf)))
        if not least >= 0:
            raise ValueError(f"an error of {least} is no state of a run")
        self.weights, self._least = weights, least


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

    What is damaged, of another layer than most name, or far from what is usual is left out and named in the log.

    Parameters
    ----------
    replies : iterable of Message
        To instructions with ``round_zero``.
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
    kept = _usual(
        _of_one_layer(list(_read(replies, manifest, limits, left_out, holds)), left_out), left_out
    )
    record.accepted += [sent.reply for sent in kept]
    if not kept:
        _LOG.warning("round zero: no client sent sums for a head; it stays as it is")
        return Solved(dict(weights))
    total = kept[0].sums
    for sent in kept[1:]:
        total = total + sent.sums
    bias = total.weight.removesuffix("weight") + "bias"
    outputs = manifest.shape(total.weight)[0]
    has_bias = bias in manifest.index and manifest.shape(bias) == (outputs,)
    head = closed_form_head(total, intercept=has_bias)
    _LOG.info(
        "round zero: %s in closed form from %d examples of %d clients; its squared error is %.2f of the mean's",
        total.weight, total.num_examples, len(kept), head.error,
    )  # fmt: skip
    solved = dict(weights)
    solved[total.weight] = head.weight.astype(manifest.array_dtype(total.weight))
    if has_bias:
        solved[bias] = head.bias.astype(manifest.array_dtype(bias))
    return Solved(solved, total.weight.removesuffix("weight").removesuffix("."), head.error)


def _read(
    replies: Iterable[Message],
    manifest: Manifest,
    limits: Limits,
    left_out: Callable[[int, str], None],
    holds: Callable[[int, int | None], None],
) -> Iterable[_Sent]:
    for message in replies:
        node = message.metadata.src_node_id
        try:
            if message.has_error():
                raise UpdateError(message.error.reason or "no reason given")
            reply = read_train_reply(message.content)
            sums = decode_head_sums(reply.packed, manifest, limits)
        except UpdateError as error:
            left_out(node, str(error))
            continue
        holds(node, reply.have)
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

    Who had the time for some of its examples only stands for all of them, and nobody for more than so many times
    what is usual. All together count as many examples as were seen.
    """
    kept, most = found, np.inf
    if len(found) >= _FEWEST:
        power = median(sent.power for sent in found)
        most = _UNUSUAL * median(sent.examples for sent in found)
        kept = []
        for sent in found:
            if not power / _UNUSUAL <= sent.power <= power * _UNUSUAL:
                times = (sent.power / power) ** 0.5 if power > 0 else np.inf
                left_out(sent.node, f"its features are {times:.3g} times as large as usual")
                continue
            kept.append(sent)
    stands_for = [min(sent.examples, most) for sent in kept]
    seen = sum(min(sent.sums.num_examples, most) for sent in kept)
    shares = [
        each / sent.sums.num_examples * seen / sum(stands_for)
        for each, sent in zip(stands_for, kept, strict=True)
    ]
    return [
        sent if share == 1.0 else replace(sent, sums=_scaled(sent.sums, share))
        for share, sent in zip(shares, kept, strict=True)
    ]


def _scaled(sums: HeadSums, share: float) -> HeadSums:
    products, targets, squares = (
        share * each for each in (sums.products, sums.targets, sums.squares)
    )
    return replace(sums, products=products, targets=targets, squares=squares)
