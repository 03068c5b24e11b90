"""Access to the examples of a batch's inputs, in any form of inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fl_elastic.errors import ModelError
from fl_elastic.groups.forward import is_sparse


def entries(inputs: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every entry of nested dicts, tuples and lists with its path; anything else is one entry.

    Examples
    --------
    >>> [path for path, _ in entries({"pixels": 1, "sizes": (2, 3)})]
    ['.pixels', '.sizes.0', '.sizes.1']
    """
    if isinstance(inputs, Mapping):
        for name, value in inputs.items():
            yield from entries(value, f"{path}.{name}")
    elif isinstance(inputs, (tuple, list)):
        for place, value in enumerate(inputs):
            yield from entries(value, f"{path}.{place}")
    else:
        yield path, inputs


def count_rows(inputs: Any) -> int:
    """Return how many rows the inputs have: the length of the first tensor.

    Raises
    ------
    ModelError
        If there is no tensor with rows, or a sparse one, whose rows cannot be selected.

    Examples
    --------
    >>> count_rows({"tokens": torch.zeros(4, 9), "use_cache": False})
    4
    """
    tensors = [entry for _, entry in entries(inputs) if isinstance(entry, Tensor)]
    if any(map(is_sparse, tensors)):
        raise ModelError(
            "the inputs hold a sparse tensor, from which examples cannot be taken: give dense tensors"
        )
    for tensor in tensors:
        if tensor.dim():
            # Not by len(), which makes the number a constant in an exported model.
            return tensor.shape[0]
    raise ModelError(
        f"inputs or targets of type {type(inputs).__name__} hold no tensor with a row per example: give tensors"
    )


def layout_of(inputs: Any) -> tuple[tuple[str, str], ...]:
    """Return the entries of the inputs, and for each whether it has a row per example.

    Examples
    --------
    >>> layout_of({"tokens": torch.zeros(4, 9), "positions": torch.zeros(1, 9), "use_cache": False})
    (('.tokens', 'rows'), ('.positions', 'shared'), ('.use_cache', 'bool'))
    """
    found = list(entries(inputs))
    first = next((each for _, each in found if isinstance(each, Tensor) and each.dim()), None)
    return tuple((path, _kind_of(each, first)) for path, each in found)


def sizes_of(inputs: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the shape of one example in each tensor of the inputs; the whole shape of a tensor that all share.

    Examples
    --------
    >>> sizes_of({"tokens": torch.zeros(4, 9), "positions": torch.zeros(1, 9)})
    (('.tokens', (9,)), ('.positions', (1, 9)))
    """
    rows = {path for path, kind in layout_of(inputs) if kind == "rows"}
    return tuple(
        (path, tuple(each.shape[1:] if path in rows else each.shape))
        for path, each in entries(inputs)
        if isinstance(each, Tensor)
    )


def map_rows(change: Callable[[Tensor], Tensor], inputs: Any) -> Any:
    """Apply ``change`` to every tensor with a row per example; entries that all examples share are not changed.

    Examples
    --------
    >>> map_rows(lambda rows: rows[:1], (torch.zeros(4, 2), torch.tensor(3.0)))
    (tensor([[0., 0.]]), tensor(3.))
    """
    count = count_rows(inputs)

    def changed(value: Any) -> Any:
        if isinstance(value, Tensor):
            return change(value) if value.dim() and value.shape[0] == count else value
        if isinstance(value, Mapping):
            return {name: changed(each) for name, each in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(changed, value))
        if isinstance(value, (tuple, list)):
            return type(value)(map(changed, value))
        return value

    return changed(inputs)


def take_examples(inputs: Any, rows: slice | list[int]) -> Any:
    """Return the inputs of some of the examples.

    Examples
    --------
    >>> take_examples({"tokens": torch.arange(4), "use_cache": False}, [1, 3])
    {'tokens': tensor([1, 3]), 'use_cache': False}
    """
    return map_rows(lambda tensor: tensor[rows], inputs)


def few_of(batch: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return two examples of a batch, which suffice to find shapes; the whole batch if it cannot be divided.

    Examples
    --------
    >>> few_of((torch.zeros(4, 3), torch.arange(4)))[1]
    tensor([0, 1])
    """
    try:
        return take_examples(batch[0], [0, 1]), take_examples(batch[1], [0, 1])
    except (ModelError, IndexError):
        return batch


def join_examples(parts: Sequence[Any]) -> Any:
    """Join the inputs of several batches of the same layout; shared entries are taken from the first batch.

    Examples
    --------
    >>> join_examples([{"tokens": torch.zeros(2, 3)}, {"tokens": torch.ones(1, 3)}])["tokens"].shape
    torch.Size([3, 3])
    """
    rows: list[list[Tensor]] = []
    for part in parts:
        own: list[Tensor] = []
        map_rows(lambda tensor, own=own: own.append(tensor) or tensor, part)  # type: ignore[misc]
        rows.append(own)
    joined = iter([torch.cat(row) for row in zip(*rows, strict=True)])
    return map_rows(lambda _: next(joined), parts[0])


def _kind_of(entry: Any, first: Tensor | None) -> str:
    if not isinstance(entry, Tensor):
        return type(entry).__name__
    return "rows" if first is not None and entry.dim() and len(entry) == len(first) else "shared"
