"""The initial arrays of a run."""

from __future__ import annotations

from flwr.app import ArrayRecord
from torch import nn

from fl_elastic.flower.records import as_record
from fl_elastic.update import Manifest, weights_of


def initial_arrays(model: nn.Module, *, whole: bool = False) -> ArrayRecord:
    """Return the arrays that a server begins with: the trained tensors, and the digest of a frozen base.

    A client with another frozen base refuses to train and says so. For a model without a frozen base these are all
    tensors.

    Parameters
    ----------
    model : nn.Module
        The model as on the devices.
    whole : bool
        Whether to send the frozen base as well, for devices that do not have it.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    >>> _ = model[0].requires_grad_(False)
    >>> list(initial_arrays(model))
    ['1.weight', '1.bias', 'fl_elastic.frozen_base']
    """
    return as_record(weights_of(model, Manifest.of(model, whole=whole)))
