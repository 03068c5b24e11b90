"""A stream's head in closed form: solved from sums over its samples after each label, without training steps."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_elastic.closed_form.head import closed_form_head
from fl_elastic.closed_form.running_head import RunningHead
from fl_elastic.closed_form.running_sums import RunningSums
from fl_elastic.errors import StreamDataError, StreamError, UpdateError
from fl_elastic.readout.readout_module import Readout
from fl_elastic.streaming.classifier import Classifier
from fl_elastic.streaming.growing_head import last_linear
from fl_elastic.streaming.guard import Guard, Row, Score
from fl_elastic.streaming.learning_rule import Adaptation, LearningRule, RuleState
from fl_elastic.streaming.progress import Progress
from fl_elastic.streaming.round_inbox import RoundChange
from fl_elastic.streaming.solved_head_state import SolvedHeadState, sample_weights
from fl_elastic.streaming.store.sample_store import SampleStore
from fl_elastic.streaming.stream_memory import StreamMemory
from fl_elastic.streaming.stream_options import ClosedForm

# Number of stored samples from which the penalty is chosen.
_HELD_OUT = 320
# The penalty is first chosen at this many samples, then each time their number has doubled.
_FIRST_CHOICE = 16
# A feature further from its mean than this many standard deviations is an outlier, whose square would outweigh all
# others, and is clipped. The second number is that of samples from which on features are clipped.
_FURTHEST, _LEAST = 100.0, 16
# Instead of lowering the weights of older samples, newer ones get larger weights. When the exponent of the newest
# weight exceeds this number, all weights are rescaled.
_LARGEST = 30.0


class SolvedHead(LearningRule):
    """The head of a classifier, solved from sums over all learned samples.

    Samples wait until the next `update`, which adds them all at once. An adaptation chooses the penalty again, by
    the error on stored samples that are held out of the sums.

    Parameters
    ----------
    how : ClosedForm
        Settings.
    classifier : Classifier
        The model; its last layer is overwritten.
    guard : Guard
        Decides whether the new head is worse than the present one.
    store : SampleStore
        Holds the samples that the head has learned.
    seed : int
        Seed of the draws from the store.

    Raises
    ------
    StreamError
        If the sums from before the stream belong to another layer.
    """

    exact: ClassVar[bool] = True

    def __init__(
        self, how: ClosedForm, classifier: Classifier, guard: Guard, store: SampleStore, seed: int
    ) -> None:
        self._how, self._classifier, self._guard = how, classifier, guard
        self._store, self._seed = store, seed
        self._waiting: list[Row] = []
        self._newest = self._base = 0
        # Samples that were subtracted from the sums and may still be in the store.
        self._gone: set[int] = set()
        sums = self._sums_before()
        self._head, self._chosen_at = RunningHead(sums), sums.weight
        before = how.before
        self._changed = before is not None
        if before is not None and before.folds:
            self._head.take_penalty(closed_form_head(before).penalty)

    @property
    def reads(self) -> str:
        """The places that the head reads; ``last`` for the input of the last layer."""
        model = self._classifier.model
        return str(model.reading) if isinstance(model, Readout) else "last"

    @property
    def layer(self) -> nn.Linear:
        """The layer into which the head is written."""
        body = self._classifier.body
        layer = last_linear(self._classifier.model) if body is None else body.module
        assert isinstance(layer, nn.Linear)
        return layer

    @property
    def sums(self) -> RunningSums:
        """Sums over all samples that were learned up to the last `update`."""
        return self._head.sums

    @property
    def _before(self) -> float:
        """Number of examples from before the stream."""
        return 0.0 if self._how.before is None else float(self._how.before.num_examples)

    def kept(self, features: NDArray[Any]) -> NDArray[Any]:
        """Return features with outliers clipped to the largest allowed distance, as read back from the store.

        Features that are later subtracted from the sums must equal those that were added. Refused is raised if the
        store's encoding cannot represent them.
        """
        if self.sums.weight >= _LEAST * self._newest_weight:
            mean, far = self.sums.mean, _FURTHEST * np.sqrt(self.sums.spread)
            features = np.asarray(np.clip(features, mean - far, mean + far), features.dtype)
        self._store.refuse_beyond(features)
        return self._store.as_kept(features)

    def drop(self, numbers: Collection[int]) -> None:
        """Discard these samples if they still wait to be learned."""
        self._waiting = [row for row in self._waiting if row.number not in numbers]

    def learn(self, row: Row) -> None:
        """Queue a labelled sample, which the next `update` adds to the sums at the latest."""
        self._waiting.append(row)

    def relabel(self, row: Row, y: int) -> None:
        """Move a learned sample to another class."""
        self._take_in()
        was, now = self._outputs([row]), self._classifier.classes.outputs(np.array([y], np.int64))
        self._head.relabel(row.x[None], was, now, self._weights([row]))
        self._changed = True

    def update(self, held_out: Sequence[Row], *, guarded: bool = True) -> str | None:
        """Write the newest head into the model if it has changed."""
        grown = self.sums.targets.shape[1] < self.layer.out_features
        changed = self._changed or bool(self._waiting) or grown
        if self._classifier.body is None or not changed:
            return None
        _, _, undone = self._put(held_out, guarded=guarded)
        return undone

    def is_due(self, progress: Progress) -> bool:
        """Return whether it is time to choose the penalty again."""
        del progress
        return self.sums.weight >= max(2 * self._chosen_at, _FIRST_CHOICE * self._newest_weight)

    def adapt(self, memory: StreamMemory, progress: Progress) -> Adaptation | None:
        """Choose the penalty again, and write the head solved with it into the model."""
        if not self.sums.weight or self._classifier.body is None:
            return None
        began = time.perf_counter()
        self._choose_penalty(memory, progress)
        before, after, undone = self._put(memory.held_out)
        return Adaptation(
            at=progress.labelled, drift=progress.since_drift is not None,
            trained=(self._classifier.head_name,), groups=1, steps=0,
            seconds=time.perf_counter() - began, selection_seconds=0.0, loss=after.loss,
            before=before, after=after, undone=undone,
        )  # fmt: skip

    def forget(
        self, rows: Sequence[Row], memory: StreamMemory, progress: Progress, *, alpha: float | None
    ) -> tuple[int, Sequence[Row]]:
        """Subtract these samples from the sums; the head is then that of all others."""
        del alpha
        self._take_in()
        beside = {row.number for row in memory.held_out} | self._gone
        learned = [row for row in rows if row.number not in beside]
        self._gone |= {row.number for row in learned}
        if learned:
            x = np.stack([row.x for row in learned])
            self._head.remove(x, self._outputs(learned), self._weights(learned))
            self._changed = True
        # The penalty was chosen with these samples: choose it again without them.
        self._choose_penalty(memory, progress)
        return self.layer.weight.numel(), learned

    def learn_again(self, rows: Sequence[Row]) -> None:
        """Learn samples again that were subtracted."""
        self._waiting += rows
        self._gone -= {row.number for row in rows}

    def erased(self) -> None:
        """Note that the store no longer holds any subtracted sample."""
        self._gone.clear()

    def apply_round_result(self, change: RoundChange, held_out: Sequence[Row]) -> str:
        """Return why no round's change is applied."""
        del change, held_out
        return "the head is in closed form, from this stream's own sums"

    def to_state(self) -> RuleState:
        """Return the state to save; from then on this head behaves like one restored from this state."""
        self._take_in()
        self._head.renew()
        head = SolvedHeadState(
            self.sums.to_state(), self._head.penalty, self._newest, self._base, self._chosen_at,
            self._how.remember, self._before, frozenset(self._gone), self._changed,
        )  # fmt: skip
        return RuleState(head=head)

    def restore(self, state: RuleState, *, same_features: bool) -> None:
        """Restore the sums, if they are of the same features.

        Raises
        ------
        StreamError
            If they were saved with another ``remember`` or ``before``.
        """
        head = state.head
        if head is None or not same_features:
            return
        if head.remember != self._how.remember:
            raise StreamDataError(
                f"the saved head was made with remember={head.remember}, not {self._how.remember}: give "
                "the same, or another state_dir"
            )
        if head.before != self._before:
            raise StreamDataError(
                f"the saved head began from sums over {head.before:g} examples, not {self._before:g}: give the "
                "same before=, or another state_dir"
            )
        self._head.restore(RunningSums.of_state(head.sums), head.penalty)
        self._newest, self._base = head.newest, head.base
        self._chosen_at, self._changed = head.chosen_at, head.changed
        if head.gone:
            # These samples were subtracted, but the process ended before the store had erased them.
            self._store.erase(head.gone)

    def _sums_before(self) -> RunningSums:
        """Return the sums from before the stream."""
        layer, before = self.layer, self._how.before
        if before is None:
            return RunningSums(layer.in_features, layer.out_features)
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
        return sums

    def _choose_penalty(self, memory: StreamMemory, progress: Progress) -> None:
        """Choose the penalty by the error on some learned samples, held out of the sums."""
        self._take_in()
        rows = self._learned_rows(memory, progress.adaptations)
        if rows:
            with suppress(UpdateError):
                # The next `update` reports the same error.
                self._head.choose_penalty(
                    np.stack([row.x for row in rows]), self._outputs(rows), self._weights(rows)
                )
            self._changed = True
        self._chosen_at = self.sums.weight

    def _learned_rows(self, memory: StreamMemory, seed: int) -> list[Row]:
        """Return some stored samples that the head has learned; the newest if older samples have less weight."""
        memory.settle()
        if self._how.remember is not None:
            ids = self._store.ids(version=memory.version)[-_HELD_OUT:]
        else:
            draw = np.random.default_rng((self._seed, seed))
            ids = self._store.draw(_HELD_OUT, version=memory.version, generator=draw)
        return memory.known(sorted({*ids.tolist()} - self._gone))

    def _put(self, held_out: Sequence[Row], *, guarded: bool = True) -> tuple[Score, Score, str]:
        """Write the newest head into the layer, unless it is guarded and worse on the held-out window.

        Returns the scores before and after, and why the head was undone, empty if it was kept.
        """
        self._take_in()
        layer, classifier = self.layer, self._classifier
        kept = layer.weight.clone(), layer.bias.clone()
        before = classifier.score(held_out)
        try:
            found = self._head.layer()
        except UpdateError as error:
            self._changed = False
            return before, before, str(error)
        self._write(torch.from_numpy(found.weight), torch.from_numpy(found.bias))
        after = classifier.score(held_out)
        self._changed = False
        undone = self._guard.worse(before, after) if guarded else ""
        if undone:
            # The sums stay: the next sample gives another head.
            self._write(*kept)
        return before, before if undone else after, undone

    def _write(self, weight: Tensor, bias: Tensor) -> None:
        with torch.no_grad():
            self.layer.weight.copy_(weight)
            self.layer.bias.copy_(bias)

    def _take_in(self) -> None:
        """Add all waiting samples to the sums at once."""
        outputs = self.layer.out_features
        if self.sums.targets.shape[1] < outputs:
            self._head.grow(outputs)
            self._changed = True
        if not self._waiting:
            return
        rows, self._waiting = self._waiting, []
        self._newest = max(self._newest, *(row.number for row in rows))
        if self._how.remember and self._newest - self._base > _LARGEST * self._how.remember:
            share = 1.0 / self._newest_weight
            self._head.scale(share)
            self._chosen_at, self._base = share * self._chosen_at, self._newest
        counts = self._weights(rows) if self._how.remember else None
        self._head.add(np.stack([row.x for row in rows]), self._outputs(rows), counts)
        self._changed = True

    @property
    def _newest_weight(self) -> float:
        return float(sample_weights([self._newest], self._base, self._how.remember)[0])

    def _weights(self, rows: Iterable[Row]) -> NDArray[np.float64]:
        """Return the weights of samples in the unit of the sums."""
        return sample_weights([row.number for row in rows], self._base, self._how.remember)

    def _outputs(self, rows: Sequence[Row]) -> NDArray[np.int64]:
        return self._classifier.classes.outputs(np.array([row.y for row in rows], np.int64))
