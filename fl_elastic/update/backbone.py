"""A pretrained backbone in one file: a fleet's initial weights without the head, and their digest."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_elastic.errors import ArchiveError, ModelError
from fl_elastic.state.archive import Archive, Kind, read_archive, write_archive
from fl_elastic.update.manifest import base_digest, hex_of

if TYPE_CHECKING:
    from torch import nn


_KIND = Kind("fl_elastic.backbone")


def write_backbone(
    path: str | os.PathLike[str],
    model: nn.Module,
    head: Collection[str],
    facts: Mapping[str, Any] | None = None,
) -> str:
    """Write all tensors of a model except its head's to a file, atomically; return their digest.

    For a model of which only the head trains, :func:`~fl_elastic.flower.initial_arrays` sends the same digest, and
    a device with another backbone refuses to train.

    Parameters
    ----------
    path : path-like
        The file.
    model : nn.Module
        The model with the weights to write.
    head : collection of str
        Names of the head's tensors, which are left out because each fleet has its own classes.
    facts : mapping, optional
        Facts about the origin of the weights, as JSON values.

    Raises
    ------
    ModelError
        If no tensor would be left to write.
    OSError
        If the file cannot be written.
    """
    arrays = {n: t.cpu().numpy() for n, t in model.state_dict().items() if n not in set(head)}
    digest = base_digest(model, head)
    if digest is None:
        raise ModelError("all tensors of the model are its head: there is no backbone to write")
    found = hex_of(digest)
    write_archive(path, _KIND, {**(facts or {}), "digest": found}, arrays, mode=None)
    return found


def load_backbone(model: nn.Module, path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Load the file of `write_backbone` into a model that may have another head.

    Parameters
    ----------
    model : nn.Module
        Changed only if all tensors fit.
    path : path-like
        The file.

    Returns
    -------
    tuple of str
        Names of the parameters that the file does not contain: those of the head.

    Raises
    ------
    ModelError
        If the file is damaged, not a backbone, or the backbone of another model.
    OSError
        If the file cannot be read.

    Examples
    --------
    >>> import tempfile
    >>> import torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    >>> other = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 9))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     digest = write_backbone(f"{folder}/backbone.fle", model, ["1.weight", "1.bias"])
    ...     left = load_backbone(other, f"{folder}/backbone.fle")
    >>> left, torch.equal(other[0].weight, model[0].weight)
    (('1.weight', '1.bias'), True)
    """
    import torch

    archive = _read(Path(path))
    own = model.state_dict()
    for name, array in archive.arrays.items():
        shape = tuple(own[name].shape) if name in own else "no such tensor"
        if shape != array.shape:
            raise ModelError(
                f"backbone {path} holds {name!r} of shape {array.shape}, the model has {shape}: build the "
                "model for which it was prepared"
            )
    before = {name: own[name].clone() for name in archive.arrays}
    model.load_state_dict({n: torch.from_numpy(a) for n, a in archive.arrays.items()}, strict=False)
    digest = base_digest(model, [name for name in own if name not in archive.arrays])
    if digest is None or hex_of(digest) != archive.facts.get("digest"):
        model.load_state_dict(before, strict=False)
        raise ModelError(
            f"backbone {path} is not this model's: its tensors come in another order or dtype; build the model for "
            "which it was prepared, in the same dtype"
        )
    return tuple(name for name, _ in model.named_parameters() if name not in archive.arrays)


def _read(path: Path) -> Archive:
    try:
        return read_archive(path, _KIND)
    except ArchiveError as error:
        raise ModelError(
            f"backbone {path} is not used: {error}; prepare or fetch it again"
        ) from None
