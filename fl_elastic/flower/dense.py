"""Between partial updates and the complete models that Flower's strategies expect."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from fl_elastic.errors import UpdateError
from fl_elastic.update import Manifest, PartialUpdate
from fl_elastic.update.manifest import Role

__all__ = ["completed", "no_longer_than", "parameters_of", "whole_model"]

Weights = dict[str, NDArray[Any]]
_Weights = Mapping[str, NDArray[Any]]


def parameters_of(weights: _Weights, manifest: Manifest, most: int | None = None) -> ArrayRecord:
    """Return the parameters, which are all that an inner strategy may see; the first ``most`` of them."""
    names = [name for name in manifest.names if manifest.role(name) is Role.PARAMETER]
    return ArrayRecord({name: _as_vector(weights[name]) for name in names[:most]})


def completed(update: PartialUpdate, weights: _Weights, manifest: Manifest) -> ArrayRecord:
    """Return the parameters of one client, with the global value where it did not train.

    Raises
    ------
    UpdateError
        If the update changes nothing: a change of norm 0 cannot be clipped.
    """
    arrays = {
        name: np.asarray(weights[name] + update.deltas.get(name, 0.0), manifest.array_dtype(name))
        for name in manifest.names
        if manifest.role(name) is Role.PARAMETER
    }
    # Flower scales the change to the clipping norm, dividing by its own norm.
    if all(np.array_equal(array, weights[name]) for name, array in arrays.items()):
        raise UpdateError("it changes nothing, and a change of norm 0 cannot be clipped")
    return ArrayRecord({name: _as_vector(each) for name, each in arrays.items()})


def whole_model(parameters: ArrayRecord, others: _Weights, manifest: Manifest) -> Weights:
    """Join the inner strategy's parameters with statistics and counters, in the manifest's dtypes.

    Raises
    ------
    UpdateError
        If a parameter has another size.
    """
    whole = {}
    for name in manifest.names:
        array = parameters[name].numpy() if name in parameters else others[name]
        if array.size != math.prod(manifest.shape(name)):
            raise UpdateError(
                f"the inner strategy gives {name!r} the shape {array.shape}, the model has {manifest.shape(name)}: "
                "what it keeps from round to round, or its checkpoint, is of another model"
            )
        whole[name] = np.asarray(array, manifest.array_dtype(name)).reshape(manifest.shape(name))
    return whole


def no_longer_than(
    limit: float, base: _Weights, asked: _Weights, moved: _Weights, manifest: Manifest
) -> Weights:
    """Return the moved model, its step shortened to ``limit`` times the one that the clients asked for.

    Parameters
    ----------
    limit : float
        Of the norms of the parameters' changes.
    base, asked, moved : mapping of str to ndarray
        The model before the round, as the clients' updates have it, and as a server's optimiser has it.
    manifest : Manifest
        Of the model.
    """
    names = [name for name in manifest.names if manifest.role(name) is Role.PARAMETER]
    wanted, taken = (
        math.sqrt(sum(_square(each[name], base[name]) for name in names)) for each in (asked, moved)
    )
    if taken <= limit * wanted * (1 + 1e-6):
        return dict(moved)
    share = limit * wanted / taken
    shorter = {
        name: np.asarray(
            base[name] + share * (np.asarray(moved[name], np.float64) - base[name]),
            manifest.array_dtype(name),
        )
        for name in names
    }
    return {**moved, **shorter}


def _square(one: NDArray[Any], other: NDArray[Any]) -> float:
    return float(np.square(np.asarray(one, np.float64) - other).sum())


def _as_vector(array: NDArray[Any]) -> Array:
    """Give a tensor without dimensions one: Flower's clipping and optimisers lose such tensors.

    numpy turns their sums into bare numbers, which in-place operations then miss.
    """
    return Array(np.atleast_1d(array))
