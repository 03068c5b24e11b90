"""Tensors that record when Python code reads their values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

_READING = {
    "item", "tolist", "numpy", "is_nonzero", "equal", "allclose",
    "__bool__", "__float__", "__int__", "__index__", "__array__", "__contains__",
}  # fmt: skip


@dataclass
class Seen:
    """Whether the value of a watched tensor was read."""

    read: bool = False


_OPEN: list[Seen] = []


@contextmanager
def watched() -> Iterator[Seen]:
    """Record inside the block whether values of `Watched` tensors are read."""
    _OPEN.append(Seen())
    try:
        yield _OPEN[-1]
    finally:
        _OPEN.pop()


def is_watching() -> bool:
    """Return whether a `watched` block is open."""
    return bool(_OPEN)


class Watched(Tensor):
    """A tensor whose values are watched, as are those of every result computed from it.

    Examples
    --------
    >>> import torch
    >>> with watched() as seen:
    ...     doubled = 2 * torch.ones(3).as_subclass(Watched)
    ...     before = seen.read
    ...     positive = bool(doubled.sum() > 0)
    >>> before, seen.read
    (False, True)
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; record it if it returns values to Python."""
        if _OPEN and getattr(func, "__name__", "") in _READING:
            _OPEN[-1].read = True
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
