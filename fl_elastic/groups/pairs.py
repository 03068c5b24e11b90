"""Batches as loaders give them, as pairs of what a model takes and what its outputs are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fl_elastic.errors import TrainingError

__all__ = ["LABELS", "as_pair"]

LABELS = "labels"
"""What models of transformers call their targets, from which they compute a loss of their own."""

_TARGETS = ("label", "targets", "target")


def as_pair(batch: Any) -> tuple[Any, Any]:
    """Return inputs and targets of a batch.

    Of two entries they are these; of more the last one is the targets, and the others are the inputs. Of a mapping
    by names the targets are ``labels``, which stay among the inputs as well, since models that know the name
    compute their loss from them; or ``label``, ``targets`` or ``target``, which do not. One tensor that is left is
    given as it is.

    Raises
    ------
    TrainingError
        If the batch has no such entry, or is none of these.

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
    """Whether an entry of a batch can hold examples."""
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
