"""Pretrained weights from npz files and prepared backbones."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fl_elastic.errors import ModelError
from fl_elastic.state.archive import is_archive
from fl_elastic.update.backbone import load_backbone
from fl_elastic_simulations.data.files import npz_arrays


def load_pretrained(model: nn.Module, path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Load the tensors of an npz file, or of a file of `fl-elastic prepare`, into tensors of the same names.

    Returns
    -------
    tuple of str
        Parameters of the model that the file does not hold, such as those of a new head.

    Raises
    ------
    DatasetError
        If the file is missing or damaged.
    ModelError
        If a tensor of the file is missing in the model or has another shape, or the file is a damaged backbone.
    """
    path = Path(path)
    if is_archive(path):
        return load_backbone(model, path)
    try:
        with np.load(path, allow_pickle=False) as archive:
            names = tuple(archive.files)
    except (OSError, ValueError):
        names = ()
    arrays = npz_arrays(path.stem, path, names)
    own = model.state_dict()
    for name, array in arrays.items():
        if name not in own or tuple(own[name].shape) != array.shape:
            expected = tuple(own[name].shape) if name in own else "no such tensor"
            raise ModelError(
                f"weights {path} hold {name!r} of shape {array.shape}, the model has {expected}: "
                "take the weights of this model"
            )
    model.load_state_dict({n: torch.from_numpy(a) for n, a in arrays.items()}, strict=False)
    return tuple(name for name, _ in model.named_parameters() if name not in arrays)
