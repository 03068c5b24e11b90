"""Rounds on a stream: which tensors come from the global model, how models are joined, and which update is sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import StreamError
from fl_elastic.flower.tasks.evaluate import Evaluate
from fl_elastic.flower.tasks.task import RoundTask
from fl_elastic.flower.tasks.train import Train
from fl_elastic.groups.graph import BackwardGraph
from fl_elastic.streaming.body import Upper
from fl_elastic.streaming.classifier import Classifier
from fl_elastic.streaming.guard import Row
from fl_elastic.streaming.labelled_weights import LabelledWeights, Shares, head_tensors, overlaid
from fl_elastic.update import Manifest, PartialUpdate
from fl_elastic.update.manifest import Role
from fl_elastic.update.parts import Masks, outer_mask

# Smallest number of held-out samples by which candidates are compared.
_LEAST_SAMPLES = 8
_WAYS = "start the learner without latent replay to take part"


def relative_to_server(
    received: LabelledWeights, trained: LabelledWeights, update: PartialUpdate
) -> PartialUpdate:
    """Return the update relative to the received model, with head rows in that model's order of classes.

    Its deltas are the device's model minus the global one, so they include what the device had learned before the
    round.

    Parameters
    ----------
    received : LabelledWeights
        The global model.
    trained : LabelledWeights
        The device's model after the round, with at least the same labels.
    update : PartialUpdate
        Changes made by the round's training.
    """
    aim = overlaid(received, trained)
    parts = {
        name: _in_order(masks, received, trained) if name in received.head else masks
        for name, masks in update.parts.items()
    }
    parts = {name: masks for name, masks in parts.items() if any(m is not None for m in masks)}
    return replace(
        update,
        deltas={
            name: _within(aim.weights[name] - received.weights[name], parts.get(name))
            for name in update.deltas
        },
        parts=parts,
    )


def _within(delta: NDArray[Any], masks: Masks | None) -> NDArray[Any]:
    mask = None if masks is None else outer_mask(masks)
    return np.asarray(delta if mask is None else np.where(mask, delta, 0), delta.dtype)


def _in_order(masks: Masks, received: LabelledWeights, trained: LabelledWeights) -> Masks:
    """Return the masks of a head tensor for the server's rows; None in place of a mask of all rows."""
    rows, *others = masks
    if rows is None:
        return masks
    count = len(next(iter(received.weights[name] for name in received.head)))
    placed = np.zeros(count, np.bool_)
    for place, label in enumerate(received.labels):
        placed[place] = rows[trained.labels.index(label)]
    return (None if placed.all() else placed, *others)


@dataclass(frozen=True)
class HeadLayout:
    """Names of the tensors of a model's head, and of its running statistics."""

    head: tuple[str, ...]
    statistics: tuple[str, ...]

    @classmethod
    def of(cls, classifier: Classifier, manifest: Manifest) -> HeadLayout:
        """Return the names of a model's head tensors and running statistics."""
        statistics = tuple(n for n in manifest.names if manifest.role(n) is not Role.PARAMETER)
        return cls(head_tensors(classifier), statistics)


def best_of(
    candidates: Sequence[Shares],
    load: Callable[[Shares], None],
    classifier: Classifier,
    rows: Sequence[Row],
) -> Shares:
    """Load the joined model with the highest accuracy, and return its shares.

    Ties are broken by the least loss. The loss alone would prefer less confident models, and means of models are
    less confident. With fewer than 8 samples the first candidate is taken.

    Parameters
    ----------
    candidates : sequence of Shares
        At least one.
    load : callable
        Joins the models by these shares and loads the result into the classifier's model.
    classifier : Classifier
        Scores the samples.
    rows : sequence of Row
        Samples that are new to both models.
    """
    chosen = candidates[0]
    if len(candidates) > 1 and len(rows) >= _LEAST_SAMPLES:
        ranks = []
        for shares in candidates:
            load(shares)
            found = classifier.score(rows)
            loss = found.loss if math.isfinite(found.loss) else math.inf
            ranks.append((-found.accuracy, loss))
        chosen = candidates[ranks.index(min(ranks))]
    load(chosen)
    return chosen


def below_cut(
    graph: BackwardGraph, cut: str, names: tuple[str, ...], layout: HeadLayout
) -> set[str]:
    """Return the tensors below the fleet's cut, which every device takes unchanged from the global model.

    Parameters
    ----------
    graph : BackwardGraph
        Graph of a step of the model.
    cut : str
        The deepest group that is trained.
    names : tuple of str
        Names of the model's tensors.
    layout : HeadLayout
        Says which tensors are running statistics: those of layers above the cut are the device's own.

    Raises
    ------
    PlanError
        If the model has no group at the cut.
    """
    above = {name for group in graph.groups[: graph.groups_above(cut)] for name in group.parameters}
    layers = {name.rpartition(".")[0] for name in above}
    own = {name for name in layout.statistics if name.rpartition(".")[0] in layers}
    return {*names} - above - own


def refuse_other_features(
    upper: Upper,
    task: RoundTask,
    sent: Mapping[str, NDArray[np.generic]],
    saved: Mapping[str, NDArray[np.generic]],
) -> None:
    """Raise StreamError if the features that a learner keeps are not those of a round's model, or would change.

    Parameters
    ----------
    upper : Upper
        The part of the model that the learner trains.
    task : RoundTask
        Task of the round.
    sent, saved : mapping of str to array
        The server's model, and the learner's.
    """
    if isinstance(task, (Train, Evaluate)) and not task.cut:
        raise StreamError(
            f"the learner keeps features at {upper.place!r}, which rounds without a cut would change: give the "
            f"fleet a cut there, or {_WAYS}"
        )
    if task.cut and any(name.startswith(f"{task.cut}.") for name in upper.frozen):
        raise StreamError(
            f"the fleet trains down to {task.cut!r}, and the learner keeps features at {upper.place!r}, above it: "
            f"{_WAYS}, or with more groups above its frozen part"
        )
    for name in upper.frozen:
        if not np.array_equal(sent[name], saved[name]):
            raise StreamError(
                f"the server's model differs from the learner's below {upper.place!r}, where the learner keeps "
                f"features: {name!r} differs. Start the learner from the server's model, or {_WAYS}"
            )
