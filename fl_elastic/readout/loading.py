"""Rebuild the module of a state dict: a model, or the part of it that ends where a head reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from fl_elastic.errors import UpdateError
from fl_elastic.groups.model_state import wrapper_prefix
from fl_elastic.groups.torch_private import COMPILED, uncompiled
from fl_elastic.readout.place import HEAD
from fl_elastic.readout.readout_module import Readout
from fl_elastic.update.manifest import Manifest, array_of, load_weights, places_of


def loaded(model: nn.Module, state: Mapping[str, Any], inputs: Any) -> nn.Module:
    """Return a module with this state: a readout if the state is that of one, otherwise the model itself.

    Parameters
    ----------
    model : nn.Module
        The model that the run began with, also compiled or in a wrapper around the whole model, such as
        ``DataParallel``. A readout shares its tensors, which get the state's values.
    state : mapping of str to tensor or array
        A state dict, of the model or of such a wrapper, or the ``result.arrays`` of a run of Flower.
    inputs : any
        Inputs of a batch, in the model's form, for the shapes.

    Raises
    ------
    UpdateError
        If the state does not fit; the model is then unchanged.
    PlanError
        If the model lacks a place that the state names.

    Examples
    --------
    >>> import torch
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    >>> images = torch.zeros(5, 3, 8, 8)
    >>> state = Readout(model, "1@grid2", images, outputs=10).state_dict()
    >>> type(loaded(model, state, images)).__name__, loaded(model, model.state_dict(), images) is model
    ('Readout', True)
    """
    inside = uncompiled(model)
    prefix = wrapper_prefix(inside)
    arrays = {
        name.removeprefix(COMPILED).removeprefix(prefix): _as_array(array)
        for name, array in state.items()
    }
    places, found = places_of(arrays), model
    if places:
        weight = arrays.get(f"{HEAD}.weight")
        if weight is None or weight.ndim != 2 or not len(weight):
            raise UpdateError(f"a state that reads {places} has no {HEAD}.weight of shape (C, D)")
        found = Readout(inside.get_submodule(prefix[:-1]), places, inputs, len(weight))
    load_weights(found, Manifest.of(found), arrays)
    return found


def _as_array(value: Any) -> np.ndarray[Any, Any]:
    if isinstance(value, Tensor):
        return array_of(value)
    # Flower's arrays have a method for reading them.
    return np.asarray(value.numpy() if hasattr(value, "numpy") else value)
