"""A stream's head in closed form: solved from sums over its samples after each label, without training steps."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_elastic.errors import StreamDataError, StreamError, UpdateError
from fl_elastic.streaming.adapting import Engine, score
from fl_elastic.streaming.classifier import Classifier
from fl_elastic.streaming.guard import Row, Score
from fl_elastic.streaming.head import last_linear
from fl_elastic.update.closed_form import closed_form_head
from fl_elastic.update.head_sums import HeadSums
from fl_elastic.update.running_head import RunningHead
from fl_elastic.update.running_sums import KeptSums, RunningSums

HELD_OUT = 320
"""Number of stored samples from which the penalty is chosen."""

# The penalty is first chosen at this many samples, then each time their number has doubled.
_FIRST_CHOICE = 16
# A feature that is further from its mean than this many standard deviations is a fault: its square would outweigh
# those of all others. Features are not limited before the second number of samples has come.
_FURTHEST, _LEAST = 100.0, 16
# Newer samples get larger weights instead of older ones smaller weights. When the exponent of the newest weight
# exceeds this number, all weights are rescaled.
_LARGEST = 30.0


@dataclass(frozen=True, eq=False)
class ClosedForm:
    """Settings of a head in closed form that learns from a stream.

    It reads the input of the model's last layer. For a head that reads elsewhere, give the learner the model that
    `fl_elastic.training.read_out.readout_of` makes.

    Parameters
    ----------
    remember : float, optional
        A sample's weight falls to 1/e of a new one's after this many further samples. By default all samples have
        equal weight, so that no order of classes makes the head forget one; 1,000 to 3,000 suit streams whose
        classes change.
    before : HeadSums, optional
        Sums from before the stream, as `fl_elastic.training.head_sums` computes them locally, or from a server;
        for the labels in ``classes`` of the learner, in order.

    Examples
    --------
    >>> ClosedForm(remember=1000).remember
    1000
    """

    remember: float | None = None
    before: HeadSums | None = None

    def __post_init__(self) -> None:
        if self.remember is not None and not 1 <= self.remember < math.inf:
            raise StreamError(
                f"remember {self.remember} means nothing: give a number of samples, at least 1, or None for all"
            )


@dataclass(frozen=True)
class Put:
    """Result of putting a newer head in: scores on the window, and why it was undone; empty if it was kept."""

    before: Score
    after: Score
    undone: str


@dataclass(frozen=True, eq=False)
class SolvedHeadState:
    """State of a `SolvedHead`.

    Parameters
    ----------
    sums : KeptSums
        Sums over all samples that the head has learned.
    penalty_index : int
        Index of the penalty among the candidates.
    newest, base : int
        Numbers of the newest sample, and of the sample whose weight is 1.
    chosen_at : float
        Weight of the sums when the penalty was last chosen.
    remember : float or None
        As in `ClosedForm`.
    before : float
        Weight of the sums from before the stream.
    gone : frozenset of int
        Samples that were subtracted from the sums and may still be in the store.
    changed : bool
        Whether a newer head than the one in the model can be solved.
    """

    sums: KeptSums
    penalty_index: int
    newest: int
    base: int
    chosen_at: float
    remember: float | None
    before: float
    gone: frozenset[int]
    changed: bool

    def __post_init__(self) -> None:
        if self.remember is not None and not self.remember > 0:
            raise StreamDataError(f"remember {self.remember} is no number of samples")


class SolvedHead:
    """The head of a classifier, solved from the sums over the samples that it was given.

    Samples wait until the next `put`, which adds them all at once.

    Parameters
    ----------
    how : ClosedForm
        Settings.
    classifier : Classifier
        The model; its last layer is overwritten.

    Attributes
    ----------
    gone : set of int
        Samples that were subtracted from the sums and may still be in the store.

    Raises
    ------
    StreamError
        If the sums from before the stream belong to another layer.
    """

    def __init__(self, how: ClosedForm, classifier: Classifier) -> None:
        self._how, self._classifier = how, classifier
        self._waiting: list[Row] = []
        self._newest = self._base = 0
        self.gone: set[int] = set()
        self.clear()

    @property
    def layer(self) -> nn.Linear:
        """The layer into which the head is written."""
        body = self._classifier.body
        layer = last_linear(self._classifier.model) if body is None else body.module
        assert isinstance(layer, nn.Linear)
        return layer

    @property
    def sums(self) -> RunningSums:
        """Sums over all samples that were learned up to the last `put`."""
        return self._head.sums

    @property
    def _before(self) -> float:
        """Number of examples from before the stream."""
        return 0.0 if self._how.before is None else float(self._how.before.num_examples)

    @property
    def fades(self) -> bool:
        """Whether older samples have less weight."""
        return self._how.remember is not None

    @property
    def has_changed(self) -> bool:
        """Whether the head has changed since the last `put`."""
        grown = self.sums.targets.shape[1] < self.layer.out_features
        return self._changed or bool(self._waiting) or grown

    @property
    def is_due(self) -> bool:
        """Whether it is time to choose the penalty again."""
        weight = self._head.sums.weight
        one = float(self._counts([self._newest])[0])
        return weight >= max(2 * self._chosen_at, _FIRST_CHOICE * one)

    def kept(self, features: NDArray[Any]) -> NDArray[Any]:
        """Return features as they are kept and learned: outliers are clipped to the furthest value allowed."""
        one = float(self._counts([self._newest])[0])
        if self.sums.weight < _LEAST * one:
            return features
        mean, far = self.sums.mean, _FURTHEST * np.sqrt(self.sums.spread)
        return np.asarray(np.clip(features, mean - far, mean + far), features.dtype)

    def drop(self, numbers: Collection[int]) -> None:
        """Discard those of these samples that wait to be learned."""
        self._waiting = [row for row in self._waiting if row.number not in numbers]

    def learn(self, row: Row) -> None:
        """Queue a labelled sample; it is added to the sums at the next `put` at the latest."""
        self._waiting.append(row)

    def relabel(self, row: Row, y: int) -> None:
        """Move a learned sample to another class."""
        self._take_in()
        was, now = self._outputs([row]), self._classifier.classes.outputs(np.array([y], np.int64))
        self._head.relabel(row.x[None], was, now, self._counts([row.number]))
        self._changed = True

    def forget(self, rows: Sequence[Row]) -> None:
        """Subtract these samples from the sums; the head is then that of all others."""
        self._take_in()
        self.gone |= {row.number for row in rows}
        if rows:
            counts = self._counts([row.number for row in rows])
            self._head.remove(np.stack([row.x for row in rows]), self._outputs(rows), counts)
            self._changed = True

    def learn_again(self, rows: Sequence[Row]) -> None:
        """Learn samples again that were forgotten, after the forgetting could not be saved."""
        self._waiting += rows
        self.gone -= {row.number for row in rows}

    def choose_penalty(self, rows: Sequence[Row]) -> None:
        """Choose the penalty by the error on these learned samples when they are held out of the sums."""
        self._take_in()
        if rows:
            counts = self._counts([row.number for row in rows])
            with suppress(UpdateError):
                # The next `put` reports the same error.
                self._head.choose_penalty(
                    np.stack([row.x for row in rows]), self._outputs(rows), counts
                )
            self._changed = True
        self._chosen_at = self._head.sums.weight

    def put(self, engine: Engine, held_out: Sequence[Row], *, guarded: bool = True) -> Put:
        """Write the newest head into the layer, unless it is worse on the held-out window.

        Parameters
        ----------
        engine : Engine
            Its guard and loss function are used.
        held_out : sequence of Row
            Samples of the held-out window.
        guarded : bool
            Whether a worse head is undone.
        """
        self._take_in()
        layer, classes, body = self.layer, self._classifier.classes, self._classifier.body
        assert body is not None
        kept = layer.weight.clone(), layer.bias.clone()
        before = score(body, engine.loss_fn, held_out, classes)
        try:
            found = self._head.layer()
        except UpdateError as error:
            self._changed = False
            return Put(before, before, str(error))
        self._write(torch.from_numpy(found.weight), torch.from_numpy(found.bias))
        after = score(body, engine.loss_fn, held_out, classes)
        self._changed = False
        undone = engine.guard.worse(before, after) if guarded else ""
        if undone:
            # The sums stay: the next sample gives another head.
            self._write(*kept)
        return Put(before, before if undone else after, undone)

    def clear(self) -> None:
        """Go back to the sums from before the stream; call it when the features are those of another model."""
        layer, before = self.layer, self._how.before
        sums = RunningSums(layer.in_features, layer.out_features)
        if before is not None:
            if before.products.shape[0] != layer.in_features + 1 or not before.classes:
                raise StreamError(
                    f"sums over {before.products.shape[0] - 1} features do not fit a last layer of "
                    f"{layer.in_features} for classes: give those of this model"
                )
            if before.targets.shape[1] > layer.out_features:
                raise StreamError(
                    f"sums of {before.targets.shape[1]} classes do not fit {layer.out_features} outputs: give the "
                    "learner their labels as classes="
                )
            if before.targets.shape[1] > len(self._classifier.classes):
                raise StreamError(
                    f"sums of {before.targets.shape[1]} classes, and {len(self._classifier.classes)} labels: give "
                    "the learner their labels as classes=, in order"
                )
            sums = RunningSums.of(before)
            sums.grow(layer.out_features)
        self._head, self._waiting, self._changed = RunningHead(sums), [], before is not None
        if before is not None and before.folds:
            self._head.take_penalty(closed_form_head(before).penalty)
        self._chosen_at = sums.weight

    def to_state(self) -> SolvedHeadState:
        """Return the state to save; from now on this head equals one that was restored from it."""
        self._take_in()
        self._head.renew()
        return SolvedHeadState(
            self._head.sums.to_state(), self._head.penalty_index, self._newest, self._base, self._chosen_at,
            self._how.remember, self._before, frozenset(self.gone), self._changed,
        )  # fmt: skip

    def restore(self, state: SolvedHeadState) -> None:
        """Restore a saved state.

        Raises
        ------
        StreamError
            If it was saved with another ``remember`` or ``before``.
        """
        if state.remember != self._how.remember:
            raise StreamDataError(
                f"the saved head was made with remember={state.remember}, not {self._how.remember}: give "
                "the same, or another state_dir"
            )
        if state.before != self._before:
            raise StreamDataError(
                f"the saved head began from sums over {state.before:g} examples, not {self._before:g}: give the "
                "same before=, or another state_dir"
            )
        self._head.restore(RunningSums.of_state(state.sums), state.penalty_index)
        self._newest, self._base = state.newest, state.base
        self._chosen_at, self._waiting = state.chosen_at, []
        self._changed, self.gone = state.changed, set(state.gone)

    def _write(self, weight: Tensor, bias: Tensor) -> None:
        with torch.no_grad():
            self.layer.weight.copy_(weight)
            self.layer.bias.copy_(bias)

    def _take_in(self) -> None:
        """Add all waiting samples to the sums at once."""
        outputs = self.layer.out_features
        if self._head.sums.targets.shape[1] < outputs:
            self._head.grow(outputs)
            self._changed = True
        if not self._waiting:
            return
        rows, self._waiting = self._waiting, []
        self._newest = max(self._newest, *(row.number for row in rows))
        if self._how.remember and self._newest - self._base > _LARGEST * self._how.remember:
            share = 1.0 / float(self._counts([self._newest])[0])
            self._head.scale(share)
            self._chosen_at, self._base = share * self._chosen_at, self._newest
        counts = self._counts([row.number for row in rows]) if self._how.remember else None
        self._head.add(np.stack([row.x for row in rows]), self._outputs(rows), counts)
        self._changed = True

    def _counts(self, numbers: Iterable[int]) -> NDArray[np.float64]:
        """Return the weights of samples by their numbers, in the unit of the sums."""
        return _counts(numbers, self._base, self._how.remember)

    def _outputs(self, rows: Sequence[Row]) -> NDArray[np.int64]:
        return self._classifier.classes.outputs(np.array([row.y for row in rows], np.int64))


def saved_sums(state: SolvedHeadState) -> RunningSums:
    """Return the sums that a learner has saved, scaled so that the newest sample has weight 1."""
    sums = RunningSums.of_state(state.sums)
    newest = _counts([state.newest], state.base, state.remember)
    sums.scale(1.0 / float(newest[0]))
    return sums


def _counts(numbers: Iterable[int], base: int, remember: float | None) -> NDArray[np.float64]:
    since = np.array([number - base for number in numbers], np.float64)
    return np.exp(since / remember) if remember else np.ones(len(since))
