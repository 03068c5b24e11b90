"""What a learner from a stream tells the server, and which way of joining models is the best on its device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.groups import LossFn
from fl_elastic.streaming.adapting import score
from fl_elastic.streaming.body import Body
from fl_elastic.streaming.classifier import Classifier
from fl_elastic.streaming.guard import Row
from fl_elastic.streaming.head import ClassMap
from fl_elastic.streaming.joining import Layout
from fl_elastic.streaming.labelled import LabelledWeights, Shares, overlaid
from fl_elastic.streaming.taking_up import head_tensors
from fl_elastic.update import Manifest, PartialUpdate
from fl_elastic.update.manifest import Role
from fl_elastic.update.parts import Masks, outer_mask

__all__ = ["best_of", "layout_of", "seen_from"]

_LEAST_SAMPLES = 8


def seen_from(
    received: LabelledWeights,
    trained: LabelledWeights,
    update: PartialUpdate,
    personal: Sequence[str],
) -> PartialUpdate:
    """Return what was trained and is not personal, against the received model and in its order of classes.

    What the device had learned before the round, between its model and the global one, is part of it.

    Parameters
    ----------
    received : LabelledWeights
        The global model.
    trained : LabelledWeights
        The device's model after the round, with at least the same labels.
    update : PartialUpdate
        What the round's training changed of it.
    personal : sequence of str
        Beginnings of the names of tensors that are not sent.
    """
    aim = overlaid(received, trained)
    names = [name for name in update.deltas if not name.startswith(tuple(personal))]
    parts = {
        name: _in_order(masks, received, trained) if name in received.head else masks
        for name, masks in update.parts.items()
        if name in names
    }
    parts = {name: masks for name, masks in parts.items() if any(m is not None for m in masks)}
    return replace(
        update,
        deltas={
            name: _within(aim.weights[name] - received.weights[name], parts.get(name))
            for name in names
        },
        steps={name: update.steps[name] for name in names},
        parts=parts,
    )


def _within(delta: NDArray[Any], masks: Masks | None) -> NDArray[Any]:
    mask = None if masks is None else outer_mask(masks)
    return np.asarray(delta if mask is None else np.where(mask, delta, 0), delta.dtype)


def _in_order(masks: Masks, received: LabelledWeights, trained: LabelledWeights) -> Masks:
    """Return the masks of a tensor of the head for the server's rows; one of all rows is none."""
    rows, *others = masks
    if rows is None:
        return masks
    count = len(next(iter(received.weights[name] for name in received.head)))
    placed = np.zeros(count, np.bool_)
    for place, label in enumerate(received.labels):
        placed[place] = rows[trained.labels.index(label)]
    return (None if placed.all() else placed, *others)


def layout_of(classifier: Classifier, manifest: Manifest) -> Layout:
    """Return which tensors are the head, running statistics, and parameters of layers that keep those."""
    statistics = tuple(n for n in manifest.names if manifest.role(n) is not Role.PARAMETER)
    layers = {name.rpartition(".")[0] for name in statistics}
    norms = tuple(
        name
        for name in manifest.names
        if name not in statistics and name.rpartition(".")[0] in layers
    )
    return Layout(head_tensors(classifier), statistics, norms)


def best_of(
    candidates: Sequence[Shares],
    load: Callable[[Shares], None],
    body: Body,
    loss_fn: LossFn,
    rows: Sequence[Row],
    classes: ClassMap,
) -> Shares:
    """Load the candidate that is right most often, and return it.

    Of equal ones that with the least loss: a loss alone prefers what is less sure of itself, as means are. The
    first one is taken where there are fewer than 8 samples to tell.

    Parameters
    ----------
    candidates : sequence of Shares
        At least one.
    load : callable
        Joins the models by these shares and loads the result into ``body``.
    body : Body
        The model.
    loss_fn : callable
        Of outputs and class indices.
    rows : sequence of Row
        Samples that are new to both models.
    classes : ClassMap
        Of the model's outputs.
    """
    chosen = candidates[0]
    if len(candidates) > 1 and len(rows) >= _LEAST_SAMPLES:
        ranks = []
        for shares in candidates:
            load(shares)
            found = score(body, loss_fn, rows, classes)
            loss = found.loss if math.isfinite(found.loss) else math.inf
            ranks.append((-found.accuracy, loss))
        chosen = candidates[ranks.index(min(ranks))]
    load(chosen)
    return chosen
