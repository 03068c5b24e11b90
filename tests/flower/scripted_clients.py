"""Scripted clients of a tiny model: each trains its own tensors, by amounts that follow from round and weights."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from flwr.app import ArrayRecord
from small_federation import UpdateOf, Weights, as_record

from fl_elastic.update import Manifest, PartialUpdate
from fl_elastic.update.manifest import Role

SHAPES = {"stem.weight": (4, 3), "stem.bias": (4,), "scale": (), "head.weight": (2, 4)}
EXAMPLES = {1: 10, 2: 30, 3: 7, 4: 19}
TRAINED = {
    1: ("stem.weight", "stem.bias", "scale", "head.weight"),
    2: ("head.weight",),
    3: ("scale", "head.weight"),
    4: ("stem.bias", "head.weight"),
}
"""``stem.weight`` is trained by one client, ``head.weight`` by all; see `scripts` for a tensor of none."""


def first_weights(extra: Mapping[str, np.ndarray] | None = None) -> Weights:
    generator = np.random.default_rng(5)
    weights = {
        name: np.asarray(generator.normal(size=shape), np.float32) for name, shape in SHAPES.items()
    }
    return weights | {"untouched": np.ones(3, np.float32)} | dict(extra or {})


def first_arrays(extra: Mapping[str, np.ndarray] | None = None) -> ArrayRecord:
    return as_record(first_weights(extra))


def manifest(extra: Mapping[str, np.ndarray] | None = None) -> Manifest:
    return Manifest.of_arrays(first_weights(extra))


def scripts(everything: bool = False) -> dict[int, UpdateOf]:
    """One script per node; with ``everything`` each node trains every parameter."""
    return {node: _script(node, None if everything else TRAINED[node]) for node in EXAMPLES}


def _script(node: int, trained: tuple[str, ...] | None) -> UpdateOf:
    def update(weights: Weights, version: int) -> PartialUpdate:
        known = Manifest.of_arrays(weights)
        names = trained or [n for n in known.names if known.role(n) is Role.PARAMETER]
        generator = np.random.default_rng([node, version])
        deltas = {
            name: np.asarray(
                0.1 * generator.normal(size=weights[name].shape) - 0.05 * weights[name], np.float32
            )
            for name in names
        }
        return PartialUpdate(deltas, dict.fromkeys(deltas, 3), EXAMPLES[node], version)

    return update
