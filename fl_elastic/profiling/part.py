"""A part of a batch that is small enough for a full step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from fl_elastic.groups import Batch
from fl_elastic.groups.batch import batch_size
from fl_elastic.groups.forward import is_sparse, map_tensors, split_batch

_FEWEST_EXAMPLES = 2


def part_of(batch: Batch) -> tuple[Batch, float]:
    """Return a sixteenth of the batch, at least two examples, and how many times larger the whole batch is.

    >>> import torch
    >>> part_of((torch.zeros(64, 3), torch.zeros(64)))[0][0].shape
    torch.Size([4, 3])
    """
    inputs, targets = split_batch(batch)
    lengths: set[int] = set()

    def note(tensor: Tensor) -> Tensor:
        lengths.add(tensor.size(0) if tensor.dim() else 0)
        return tensor

    map_tensors(note, [inputs, targets])
    whole = min(lengths, default=0)
    count = max(_FEWEST_EXAMPLES, whole // 16)
    # A list holds one entry per example, such as pictures and boxes for detectors, and is not cut.
    if len(lengths) != 1 or whole <= count or _has_list((inputs, targets)):
        return batch, 1.0
    if batch_size(batch) != whole or not all(map(_can_be_cut, (inputs, targets))):
        return batch, 1.0

    def cut(value: Any) -> Any:
        # Cloned: the storage of a view would be counted in full.
        return map_tensors(lambda tensor: tensor[:count].clone(), value)

    return (cut(inputs), cut(targets)), whole / count


def _can_be_cut(value: Any) -> bool:
    """Return whether a value consists of tensors and shared values; other objects cannot be cut."""
    if isinstance(value, PackedSequence):
        return False
    if isinstance(value, Mapping):
        return all(map(_can_be_cut, value.values()))
    if isinstance(value, tuple):
        return all(map(_can_be_cut, value))
    if isinstance(value, Tensor):
        return not (is_sparse(value) or value.is_nested)
    return value is None or isinstance(value, int | float | str)


def _has_list(value: Any) -> bool:
    entries = tuple(value.values()) if isinstance(value, Mapping) else value
    return isinstance(value, list) or (isinstance(entries, tuple) and any(map(_has_list, entries)))
