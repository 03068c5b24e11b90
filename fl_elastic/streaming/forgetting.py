"""Let a stream's model forget samples, by selective synaptic dampening on what the store holds."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from fl_elastic.errors import StreamError
from fl_elastic.groups import Batch, LossFn
from fl_elastic.methods.dampening.forget import dampen, squared_gradients
from fl_elastic.streaming.body import Body
from fl_elastic.streaming.guard import Row, Score
from fl_elastic.streaming.head import ClassMap
from fl_elastic.streaming.store.sample_store import SampleStore
from fl_elastic.update.squared_gradients import SquaredGradients

__all__ = ["Forgotten", "dampen_body"]

# What the others matter is told by so many of them: each takes a pass of its own.
_MOST_OTHERS = 1000
_AT_ONCE = 64
# Share of the loss that is no change of what a model knows.
_NO_CHANGE = 0.01


@dataclass(frozen=True)
class Forgotten:
    """What came of forgetting.

    Attributes
    ----------
    examples : int
        Labelled samples that the model was made to forget.
    deleted : int
        Samples that are in no file of the learner any more.
    weights : int
        Weights that were made smaller.
    theirs_before, theirs_after : Score
        Loss and accuracy on the labelled samples that were to be forgotten: whether they were.
    before, after : Score
        The same on the window that is held out, without those.
    exact : bool
        Whether the model is now as one that never saw them: a head in closed form, from whose sums they were taken.
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
        """Whether the model is as right about labelled samples as before, with as small a loss, to a hundredth."""
        before, after = self.theirs_before, self.theirs_after
        return (
            self.examples > 0
            and not self.exact
            and after.accuracy >= before.accuracy
            and after.loss <= before.loss * (1 + _NO_CHANGE)
        )


def dampen_body(
    body: Body,
    loss_fn: LossFn,
    rows: Collection[Row],
    store: SampleStore,
    held_out: Collection[Row],
    classes: ClassMap,
    *,
    alpha: float | None,
    seed: int,
) -> int:
    """Make smaller what matters far more to these labelled samples than to all; return how many weights it was.

    Parameters
    ----------
    body : Body
        Changed in place.
    loss_fn : callable
        ``loss_fn(outputs, targets)`` of class scores and output indices.
    rows : collection of Row
        What is to be forgotten.
    store : SampleStore
        Holds what else the model has learned from, as far as anybody knows.
    held_out : collection of Row
        Known as well.
    classes : ClassMap
        Of all labels.
    alpha : float or None
        See `fl_elastic.update.squared_gradients.dampening`.
    seed : int
        Of the draw of others, where there are many.

    Raises
    ------
    StreamError
        If the store holds nothing else.
    UpdateError
        If ``alpha`` means nothing, or is too large for that many samples.
    """
    gone = {row.number for row in rows}
    version = body.version
    ids = store.ids(version=version).tolist()
    others = [number for number in ids if number not in gone]
    beside = [row for row in held_out if row.number not in gone]
    known = len(others) + len(beside)
    if not known:
        raise StreamError(
            "the store holds no labelled sample but those to be forgotten: begin anew"
        )
    if len(others) > _MOST_OTHERS:
        others = np.random.default_rng(seed).choice(others, _MOST_OTHERS, replace=False).tolist()

    def squares(loader: Iterator[Batch]) -> SquaredGradients:
        return squared_gradients(body.module, loss_fn, loader)

    few = squares(_batches(body, list(rows), classes))
    kept = squares(_of_store(body, store, others, beside, classes))
    return sum(dampen(body.module, few, few + kept.standing_for(known), alpha=alpha).values())


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
