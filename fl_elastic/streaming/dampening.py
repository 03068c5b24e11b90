"""Make a stream's model forget samples, by selective synaptic dampening with the samples in the store."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from fl_elastic.errors import StreamError
from fl_elastic.groups import Batch
from fl_elastic.methods.dampening.forget import dampen, squared_gradients
from fl_elastic.streaming.body import Body
from fl_elastic.streaming.classifier import Classifier
from fl_elastic.streaming.growing_head import ClassMap
from fl_elastic.streaming.guard import Row, Score
from fl_elastic.streaming.store.sample_store import SampleStore
from fl_elastic.update.dampening import SquaredGradients

# Largest number of other samples whose squared gradients are computed: each takes a pass of its own.
_MOST_OTHERS = 1000
_AT_ONCE = 64
# Relative change of the loss below which the model counts as unchanged.
_NO_CHANGE = 0.01


@dataclass(frozen=True)
class Forgotten:
    """Result of forgetting.

    Attributes
    ----------
    examples : int
        Number of labelled samples that the model was made to forget.
    deleted : int
        Number of samples that were deleted from all files of the learner.
    weights : int
        Number of weights that were dampened.
    theirs_before, theirs_after : Score
        Loss and accuracy on the labelled samples to be forgotten; they show whether the model forgot them.
    before, after : Score
        Loss and accuracy on the held-out window, without these samples.
    exact : bool
        Whether the model equals one that never saw them, as for a head in closed form, whose sums are subtracted.
    """

    examples: int
    deleted: int
    weights: int
    theirs_before: Score
    theirs_after: Score
    before: Score
    after: Score
    exact: bool = False

    @property
    def changed_nothing(self) -> bool:
        """Whether forgetting had no effect: accuracy on the samples not lower, their loss at most 1 % higher."""
        before, after = self.theirs_before, self.theirs_after
        return (
            self.examples > 0
            and not self.exact
            and after.accuracy >= before.accuracy
            and after.loss <= before.loss * (1 + _NO_CHANGE)
        )


def dampen_body(
    classifier: Classifier,
    rows: Collection[Row],
    store: SampleStore,
    held_out: Collection[Row],
    *,
    alpha: float | None,
    seed: int,
) -> int:
    """Dampen weights that matter far more to these labelled samples than to all; return the number of weights.

    Parameters
    ----------
    classifier : Classifier
        Its body is changed in place.
    rows : collection of Row
        Samples to be forgotten.
    store : SampleStore
        Holds the other samples from which the model has learned, as far as they are known.
    held_out : collection of Row
        Further samples that count among the others.
    alpha : float or None
        See `fl_elastic.update.dampening.dampening_factors`.
    seed : int
        Seed for drawing from the other samples if there are many.

    Raises
    ------
    StreamError
        If there is no other labelled sample.
    UpdateError
        If ``alpha`` is invalid, or too large for this number of samples.
    """
    body, loss_fn, classes = classifier.body, classifier.loss_fn, classifier.classes
    assert body is not None
    module, gone = body.module, {row.number for row in rows}
    ids = store.ids(version=body.version).tolist()
    others = [number for number in ids if number not in gone]
    beside = [row for row in held_out if row.number not in gone]
    known = len(others) + len(beside)
    if not known:
        raise StreamError(
            "the store holds no labelled samples besides those to be forgotten: start a new learner"
        )
    if len(others) > _MOST_OTHERS:
        others = np.random.default_rng(seed).choice(others, _MOST_OTHERS, replace=False).tolist()

    def squares(loader: Iterator[Batch]) -> SquaredGradients:
        return squared_gradients(module, loss_fn, loader)

    few = squares(_batches(body, list(rows), classes))
    kept = squares(_of_store(body, store, others, beside, classes))
    return sum(dampen(module, few, few + kept.standing_for(known), alpha=alpha).values())


def _of_store(
    body: Body, store: SampleStore, ids: list[int], beside: list[Row], classes: ClassMap
) -> Iterator[Batch]:
    for start in range(0, len(ids), _AT_ONCE):
        found = store.take(ids[start : start + _AT_ONCE])
        yield from _batches(
            body,
            [Row(x, y) for x, y in zip(found.x, found.y.tolist(), strict=True)],
            classes,
        )
    yield from _batches(body, beside, classes)


def _batches(body: Body, rows: list[Row], classes: ClassMap) -> Iterator[Batch]:
    for start in range(0, len(rows), _AT_ONCE):
        some = rows[start : start + _AT_ONCE]
        inputs = body.as_inputs(np.stack([row.x for row in some]))
        targets = classes.outputs(np.array([row.y for row in some], np.int64))
        yield inputs, torch.from_numpy(targets).to(inputs.device)
