"""The few inputs on which models are compared from fit to fit: they have to be the same ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_elastic.groups import Batch
from fl_elastic.groups.forward import map_tensors, split_batch

__all__ = ["kept_inputs", "with_kept"]


def kept_inputs(batch: Batch, examples: int, most_bytes: int) -> dict[str, NDArray[Any]]:
    """Return the tensors of the first examples of a batch, as many as ``most_bytes`` hold and at least one.

    Examples
    --------
    >>> batch = (torch.ones(8, 4), torch.zeros(8))
    >>> kept_inputs(batch, 16, 64)["0"].shape
    (4, 4)
    """
    while True:
        kept = {
            str(place): _as_array(leaf)
            for place, leaf in enumerate(_leaves(_first(batch, examples)))
        }
        if examples <= 1 or sum(array.nbytes for array in kept.values()) <= most_bytes:
            return kept
        examples = examples // 2


def with_kept(batch: Batch, kept: dict[str, NDArray[Any]]) -> Any:
    """Return inputs of the form that ``batch`` has, with the kept tensors; None if these are not of that form."""
    inputs = _first(batch, len(kept) if _is_listed(batch) else 1)
    leaves = _leaves(inputs)
    if [leaf.dim() for leaf in leaves] != [array.ndim for array in kept.values()]:
        return None
    arrays = iter(kept.values())
    return map_tensors(
        lambda leaf: torch.tensor(next(arrays)).to(device=leaf.device, dtype=leaf.dtype), inputs
    )


def _is_listed(batch: Batch) -> bool:
    """Whether inputs are one by one, as those of detectors."""
    inputs, targets = split_batch(batch)
    return isinstance(inputs, (list, tuple)) and isinstance(targets, (list, tuple))


def _first(batch: Batch, examples: int) -> Any:
    inputs = split_batch(batch)[0]
    if _is_listed(batch):
        return inputs[:examples]
    return map_tensors(lambda leaf: leaf[:examples] if leaf.dim() else leaf, inputs)


def _leaves(inputs: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(leaf: Tensor) -> Tensor:
        found.append(leaf)
        return leaf

    map_tensors(note, inputs)
    return found


def _as_array(leaf: Tensor) -> NDArray[Any]:
    leaf = leaf.detach().cpu()
    return np.array((leaf.float() if leaf.dtype == torch.bfloat16 else leaf).numpy())
