"""Which stored samples are replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fl_elastic.registry import Registry

__all__ = ["RETRIEVALS", "Retrieval"]

Retrieval: TypeAlias = Callable[
    [NDArray[np.int64], NDArray[np.int64], int, np.random.Generator], NDArray[np.int64]
]
"""``(ids, labels, n, generator)`` to at most ``n`` different positions."""

RETRIEVALS: Registry[Retrieval] = Registry("retrieval")
"""Retrievals by name."""


@RETRIEVALS.register("uniform")
def uniform(
    ids: NDArray[np.int64], labels: NDArray[np.int64], n: int, generator: np.random.Generator
) -> NDArray[np.int64]:
    """Each sample with the same chance."""
    del labels
    return generator.choice(len(ids), size=min(n, len(ids)), replace=False)


@RETRIEVALS.register("class_balanced")
def class_balanced(
    ids: NDArray[np.int64], labels: NDArray[np.int64], n: int, generator: np.random.Generator
) -> NDArray[np.int64]:
    """As many of each class as there are, in turn; within a class each with the same chance."""
    del ids
    order = generator.permutation(len(labels))
    rank = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        own = order[labels[order] == label]
        rank[own] = np.arange(len(own))
    # The first of each class before the second of any; classes in the order of the draw.
    return order[np.argsort(rank[order], kind="stable")][:n]


@RETRIEVALS.register("newest")
def newest(
    ids: NDArray[np.int64], labels: NDArray[np.int64], n: int, generator: np.random.Generator
) -> NDArray[np.int64]:
    """Return the newest, oldest of them first: no draw."""
    del labels, generator
    return np.argsort(ids)[len(ids) - min(n, len(ids)) :]


@RETRIEVALS.register("recent")
def recent(
    ids: NDArray[np.int64], labels: NDArray[np.int64], n: int, generator: np.random.Generator
) -> NDArray[np.int64]:
    """Newer samples with a greater chance: half of it is the newest tenth's."""
    del labels
    age = len(ids) - 1 - np.argsort(np.argsort(ids))
    weight = np.exp2(-age / max(len(ids) / 10, 1.0)) + 1e-6
    return generator.choice(len(ids), size=min(n, len(ids)), replace=False, p=weight / weight.sum())
