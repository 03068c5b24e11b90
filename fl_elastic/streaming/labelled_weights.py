"""Join weights of models whose heads have different labels: rows of heads are aligned by label.

A row whose label only one model has is kept unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.streaming.classifier import Classifier


@dataclass(frozen=True, eq=False)
class LabelledWeights:
    """A model's tensors, and the labels of the rows of its head.

    Parameters
    ----------
    weights : mapping of str to array
        All tensors.
    labels : tuple of int
        Labels of the head's first rows, in order; further rows have no label yet.
    head : tuple of str
        Names of the tensors with one row per output.
    """

    weights: Mapping[str, NDArray[Any]]
    labels: tuple[int, ...]
    head: tuple[str, ...]

    @classmethod
    def of(cls, classifier: Classifier) -> LabelledWeights:
        """Return a classifier's weights together with the labels of its outputs."""
        return cls(classifier.weights(), classifier.classes.labels, head_tensors(classifier))


def head_tensors(classifier: Classifier) -> tuple[str, ...]:
    """Return the names of the tensors with a row per output; raise ModelError if the model has no such layer."""
    name = classifier.head_name
    return tuple(each for each in classifier.model.state_dict() if each.startswith(f"{name}."))


@dataclass(frozen=True)
class Shares:
    """Shares of the global model in the joined one, from 0 to 1.

    Parameters
    ----------
    share : float
        Share for every tensor that is not fixed.
    fixed : frozenset of str
        Names of the tensors that are taken unchanged from the global model.
    """

    share: float
    fixed: frozenset[str] = frozenset()

    def of(self, name: str) -> float:
        """Return the global model's share of a tensor."""
        return 1.0 if name in self.fixed else self.share


def extended(own: LabelledWeights, other: LabelledWeights) -> LabelledWeights:
    """Return the device's model with a row for every label of the other model; rows of new labels are copied.

    New rows follow the known ones; the head grows only if it has too few rows.

    Examples
    --------
    >>> own = LabelledWeights({"b": np.array([1.0, 2.0, 9.0])}, (7, 3), ("b",))
    >>> both = extended(own, LabelledWeights({"b": np.array([5.0, 6.0])}, (4, 3), ("b",)))
    >>> both.labels, both.weights["b"].tolist()
    ((7, 3, 4), [1.0, 2.0, 5.0])
    """
    new = [label for label in other.labels if label not in own.labels]
    labels = (*own.labels, *new)
    weights = dict(own.weights)
    for name in own.head:
        rows = np.zeros((max(len(labels), len(weights[name])), *weights[name].shape[1:]))
        rows = rows.astype(weights[name].dtype)
        rows[: len(weights[name])] = weights[name]
        for place, label in enumerate(new, start=len(own.labels)):
            rows[place] = other.weights[name][other.labels.index(label)]
        weights[name] = rows
    return replace(own, weights=weights, labels=labels)


def overlaid(base: LabelledWeights, top: LabelledWeights) -> LabelledWeights:
    """Return the tensors of ``top``, with the rows of its head arranged as in ``base``.

    Rows whose label ``top`` lacks are taken from ``base``.

    Examples
    --------
    >>> base = LabelledWeights({"b": np.array([1.0, 2.0, 9.0])}, (7, 3), ("b",))
    >>> top = LabelledWeights({"b": np.array([5.0, 6.0])}, (4, 3), ("b",))
    >>> overlaid(base, top).weights["b"].tolist()
    [1.0, 6.0, 9.0]
    """
    weights = {name: top.weights[name] for name in base.weights}
    for name in base.head:
        rows = np.array(base.weights[name])
        for place, label in enumerate(base.labels):
            if label in top.labels:
                rows[place] = top.weights[name][top.labels.index(label)]
        weights[name] = rows
    return replace(base, weights=weights)


def joined(own: LabelledWeights, received: LabelledWeights, shares: Shares) -> LabelledWeights:
    """Return the weighted mean of the device's model and the global one; it has all labels of both, own ones first.

    Integer tensors are not averaged: they are those of the global model if its share is 1, else the device's.

    Examples
    --------
    >>> own = LabelledWeights({"b": np.array([1.0, 2.0])}, (7, 3), ("b",))
    >>> received = LabelledWeights({"b": np.array([5.0, 6.0])}, (4, 3), ("b",))
    >>> joined(own, received, Shares(0.5)).weights["b"].tolist()
    [1.0, 4.0, 5.0]
    """
    base = extended(own, received)
    aim = overlaid(base, received)
    return replace(
        base,
        weights={
            name: _mixed(here, aim.weights[name], shares.of(name))
            for name, here in base.weights.items()
        },
    )


def kept(
    before: LabelledWeights, trained: LabelledWeights, received: LabelledWeights, shares: Shares
) -> LabelledWeights:
    """Return ``before`` plus each tensor's change in training, scaled by one minus the global model's share of it.

    ``before`` is the model that `joined` returned. Rows of the head with a label that the global model does not
    have keep the whole change.

    Examples
    --------
    >>> before = LabelledWeights({"b": np.array([1.0, 2.0])}, (7, 3), ("b",))
    >>> trained = LabelledWeights({"b": np.array([2.0, 4.0])}, (7, 3), ("b",))
    >>> received = LabelledWeights({"b": np.array([0.0])}, (3,), ("b",))
    >>> kept(before, trained, received, Shares(0.75)).weights["b"].tolist()
    [2.0, 2.5]
    """
    weights = {}
    for name, here in before.weights.items():
        there = trained.weights[name]
        rows = _mixed(here, there, 1 - shares.of(name))
        if name in before.head:
            for place, label in enumerate(before.labels):
                if label not in received.labels:
                    rows[place] = there[place]
        weights[name] = rows
    return replace(before, weights=weights)


def _mixed(here: NDArray[Any], there: NDArray[Any], share: float) -> NDArray[Any]:
    if share == 1:
        return np.array(there)
    if share == 0 or here.dtype.kind != "f":
        return np.array(here)
    # Computed as a difference, so that equal values stay bit-identical.
    return np.asarray(here + share * (there - here), here.dtype)
