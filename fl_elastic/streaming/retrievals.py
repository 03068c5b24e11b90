"""Which stored samples are drawn for replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fl_elastic.registry import Registry

__all__ = ["RETRIEVALS", "Retrieval"]

_Integers: TypeAlias = NDArray[np.int64]

Retrieval: TypeAlias = Callable[[_Integers, int, np.random.Generator], _Integers]
"""``(labels, n, generator)`` to at most ``n`` different positions; one label or more, oldest first."""

RETRIEVALS: Registry[Retrieval] = Registry("retrieval")
"""Retrievals by name."""


@RETRIEVALS.register("uniform")
def _uniform(labels: _Integers, n: int, generator: np.random.Generator) -> _Integers:
    """Draw each sample with the same chance."""
    return generator.choice(len(labels), size=min(n, len(labels)), replace=False)


@RETRIEVALS.register("class_balanced")
def _class_balanced(labels: _Integers, n: int, generator: np.random.Generator) -> _Integers:
    """Draw as many of each class as there are, in turn; within a class each with the same chance."""
    order = generator.permutation(len(labels))
    rank = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        own = order[labels[order] == label]
        rank[own] = np.arange(len(own))
    # The first of each class before the second of any; classes in the order of the draw.
    return order[np.argsort(rank[order], kind="stable")][:n]


@RETRIEVALS.register("newest")
def _newest(labels: _Integers, n: int, generator: np.random.Generator) -> _Integers:
    """Return the newest, oldest of them first: no draw."""
    del generator
    return np.arange(len(labels))[len(labels) - min(n, len(labels)) :]


@RETRIEVALS.register("recent")
def _recent(labels: _Integers, n: int, generator: np.random.Generator) -> _Integers:
    """Draw newer samples with a greater chance: half of it is the newest tenth's."""
    age = np.arange(len(labels))[::-1]
    weight = np.exp2(-age / max(len(labels) / 10, 1.0)) + 1e-6
    size = min(n, len(labels))
    return generator.choice(len(labels), size=size, replace=False, p=weight / weight.sum())
