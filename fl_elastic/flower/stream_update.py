"""What a device that learns from a stream tells the server: its trained tensors, seen from the global model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.streaming.labelled import LabelledWeights, overlaid
from fl_elastic.update import Masks, PartialUpdate
from fl_elastic.update.parts import outer_mask

__all__ = ["seen_from"]


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
