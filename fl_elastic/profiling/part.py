"""A part of a batch that is small enough for a full step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from fl_elastic.groups import Batch
from fl_elastic.groups.batch import as_pair, batch_size, map_tensors
from fl_elastic.groups.forward import is_sparse

_FEWEST_EXAMPLES = 2


def part_of(batch: Batch, times: int = 1) -> tuple[Batch, float]:
    """Return a sixteenth of the batch, at least two examples, and the factor by which the whole batch is larger.

    Parameters
    ----------
    batch : tuple
        The whole batch, which is returned itself if it cannot be cut.
    times : int
        Factor by which to take more examples.

    Examples
    --------
    >>> import torch
    >>> part_of((torch.zeros(64, 3), torch.zeros(64)))[0][0].shape
    torch.Size([4, 3])
    >>> time_major = torch.zeros(20, 64, 3)
    >>> part_of((time_major, torch.zeros(64)))[0][0].shape
    torch.Size([20, 4, 3])
    """
    inputs, targets = as_pair(batch)
    axes: set[int | None] = set()
    whole = batch_size(batch)
    count = times * max(_FEWEST_EXAMPLES, whole // 16)

    def note(tensor: Tensor) -> Tensor:
        axes.add(_axis_of_examples(tensor, whole))
        return tensor

    map_tensors(note, [inputs, targets])
    # A list holds one entry per example, such as pictures and boxes for detectors, and is not cut.
    if not axes or None in axes or whole <= count or _has_list((inputs, targets)):
        return batch, 1.0
    if not all(map(_can_be_cut, (inputs, targets))):
        return batch, 1.0

    def cut(tensor: Tensor) -> Tensor:
        # Cloned, because the whole storage of a view would be counted.
        return tensor.narrow(_axis_of_examples(tensor, whole) or 0, 0, count).clone()

    return (map_tensors(cut, inputs), map_tensors(cut, targets)), whole / count


def _axis_of_examples(tensor: Tensor, examples: int) -> int | None:
    """Return the axis of a tensor that runs over the examples: the second one if time comes first."""
    if not tensor.dim() or tensor.size(0) == examples:
        return 0 if tensor.dim() else None
    columns = tensor.dim() > 2 and not tensor.is_nested and tensor.size(1) == examples
    return 1 if columns else None


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
