"""Read a loader of any kind: how many batches, how many examples, the first few of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from typing import Any

from fl_elastic.errors import TrainingError
from fl_elastic.groups import Batch, batch_shape, to_device

__all__ = ["LoaderSize", "epochs_of", "first_batches", "loader_size"]

LoaderSize = tuple[int, int]


def first_batches(loader: Iterable[Batch], count: int, device: Any) -> list[Batch]:
    """Return up to ``count`` batches on ``device``; raises TrainingError if the loader is empty."""
    batches = [to_device(batch, device) for batch in islice(iter(loader), max(count, 1))]
    if not batches:
        raise TrainingError("the loader gave no batch: check the client's data and batch size")
    return batches


def loader_size(loader: Iterable[Batch], first: Batch) -> LoaderSize:
    """Return batches and examples per epoch, by the loader's own word or else by counting once."""
    dataset = getattr(loader, "dataset", None)
    examples = getattr(loader, "dataset_size", None)
    if examples is None and isinstance(dataset, Sized):
        examples = len(dataset)
    batches = None if isinstance(loader, (list, tuple)) else _length(loader)
    if batches is None:
        sizes = [_batch_size(batch) for batch in loader]
        return len(sizes), sum(sizes)
    return batches, batches * _batch_size(first) if examples is None else int(examples)


def _length(loader: Iterable[Batch]) -> int | None:
    """Return the loader's own word; a DataLoader of a stream has ``__len__`` but cannot answer."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:
        return None


def _batch_size(batch: Batch) -> int:
    shape = batch_shape(batch)
    return shape[0] if shape else 1


def epochs_of(loader: Iterable[Batch], epochs: int, device: Any) -> Iterator[Batch]:
    """Yield the batches of several passes over ``loader`` on ``device``."""
    for _ in range(epochs):
        for batch in loader:
            yield to_device(batch, device)
