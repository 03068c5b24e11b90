"""Batches in the forms that loaders give, as pairs of inputs and targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fl_elastic.errors import TrainingError

__all__ = ["LABELS", "as_pair"]

LABELS = "labels"
"""Name that transformers models use for targets, from which they compute their own loss."""

_TARGETS = ("label", "targets", "target")


def as_pair(batch: Any) -> tuple[Any, Any]:
    """Return inputs and targets of a batch.

    A batch of two entries is the pair. Of more entries the last one is the targets, and the others are the inputs.
    Of a mapping the targets are ``labels``, which stay among the inputs as well, because models that know this name
    compute their loss from them; or ``label``, ``targets`` or ``target``, which are removed from the inputs. A
    single remaining input is given as it is.

    Raises
    ------
    TrainingError
        If a mapping has no such entry, or the batch has another form.

    Examples
    --------
    >>> as_pair((1, 2)), as_pair([[1], [2], [3]]), as_pair({"image": 1, "label": 2})
    ((1, 2), (([1], [2]), [3]), (1, 2))
    >>> as_pair({"input_ids": 1, "labels": 2})
    ({'input_ids': 1, 'labels': 2}, 2)
    """
    if isinstance(batch, Mapping):
        return _from_mapping({str(name): value for name, value in batch.items()})
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    if isinstance(batch, (tuple, list)) and len(batch) > 2 and all(map(_holds, batch)):
        return tuple(batch[:-1]), batch[-1]
    seen = type(batch).__name__ + (f" of {len(batch)}" if hasattr(batch, "__len__") else "")
    raise TrainingError(
        "a batch must be a pair (inputs, targets), a longer tuple that ends with the targets, or a dict with "
        f"labels, got {seen}"
    )


def _holds(entry: Any) -> bool:
    """Return whether an entry of a batch can hold examples."""
    return isinstance(entry, (Tensor, Mapping, tuple, list))


def _from_mapping(entries: dict[str, Any]) -> tuple[Any, Any]:
    if LABELS in entries:
        return entries, entries[LABELS]
    for name in _TARGETS:
        if name in entries and len(entries) > 1:
            inputs = {each: value for each, value in entries.items() if each != name}
            return (next(iter(inputs.values())) if len(inputs) == 1 else inputs), entries[name]
    raise TrainingError(
        f"a batch that is a dict needs targets under one of {[LABELS, *_TARGETS]} beside inputs, got "
        f"{sorted(entries)[:8]}"
    )
