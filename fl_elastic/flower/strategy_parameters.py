"""The model as an inner strategy sees it: its parameters alone, without statistics and counters."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from fl_elastic.errors import UpdateError
from fl_elastic.update import Manifest, PartialUpdate
from fl_elastic.update.manifest import Role, Weights


def parameters_of(weights: Weights, manifest: Manifest, most: int | None = None) -> ArrayRecord:
    """Return the parameters, which are all that an inner strategy may see; only the first ``most`` if given."""
    names = [name for name in manifest.names if manifest.role(name) is Role.PARAMETER]
    return ArrayRecord({name: _as_vector(weights[name]) for name in names[:most]})


def completed(update: PartialUpdate, weights: Weights, manifest: Manifest) -> ArrayRecord:
    """Return all parameters of one client, with the global value of those that it did not train.

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
    # Flower divides by the norm of the change.
    if all(np.array_equal(array, weights[name]) for name, array in arrays.items()):
        raise UpdateError("it changes nothing, and a change of norm 0 cannot be clipped")
    return ArrayRecord({name: _as_vector(each) for name, each in arrays.items()})


def whole_model(
    parameters: ArrayRecord, others: Weights, manifest: Manifest
) -> dict[str, NDArray[Any]]:
    """Combine the inner strategy's parameters with statistics and counters, in the manifest's dtypes.

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


def _as_vector(array: NDArray[Any]) -> Array:
    """Add a dimension to a zero-dimensional tensor, which Flower's clipping and optimisers would lose.

    numpy turns sums of such arrays into plain scalars, which in-place operations then do not change.
    """
    return Array(np.atleast_1d(array))
