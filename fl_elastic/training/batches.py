"""Read a loader of any kind: how many batches, how many examples, the first few of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils.data import BatchSampler, Dataset, IterableDataset

from fl_elastic.errors import TrainingError
from fl_elastic.groups import Batch
from fl_elastic.groups.forward import batch_shape, to_device
from fl_elastic.groups.pairs import as_pair

__all__ = [
    "LoaderSize",
    "batch_size",
    "epochs_of",
    "first_batches",
    "loader_size",
    "refuse_nothing",
]

LoaderSize = tuple[int, int]

_MOST_BATCHES = 1_000_000


def first_batches(loader: Iterable[Batch], count: int, device: Any) -> list[Batch]:
    """Return up to ``count`` batches on ``device``; raises TrainingError if the loader is empty, or is none."""
    refuse_nothing(loader)
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise TrainingError(
            f"the loader is a dataset ({type(loader).__name__}), whose single examples would be taken for batches: "
            "give DataLoader(dataset, batch_size=...)"
        )
    batches = [to_device(as_pair(batch), device) for batch in islice(iter(loader), max(count, 1))]
    if not batches:
        raise TrainingError("the loader gave no batch: check the client's data and batch size")
    return batches


def refuse_nothing(loader: object) -> None:
    """Raise TrainingError for what cannot be read, such as None of a client without such data."""
    if not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
        raise TrainingError(
            f"the loader is {loader!r}: give a list of batches or a DataLoader, and do not ask a client "
            "for what it has no data for"
        )


def loader_size(loader: Iterable[Batch], first: Batch) -> LoaderSize:
    """Return batches and examples per epoch, by the loader's own word or else by counting once.

    Samplers, ``drop_last`` and own batch samplers of a DataLoader count as they draw.

    Raises
    ------
    TrainingError
        If the loader does not know its length and has not ended after a million batches.
    """
    examples = getattr(loader, "dataset_size", None)
    batches = None if isinstance(loader, (list, tuple)) else _length(loader)
    if batches is None:
        sizes = [batch_size(batch) for batch in islice(loader, _MOST_BATCHES + 1)]
        if len(sizes) > _MOST_BATCHES:
            raise TrainingError(
                f"the loader does not know its length and gave more than {_MOST_BATCHES} batches: bound an epoch, "
                "for example with itertools.islice in a re-iterable, or give the dataset a __len__"
            )
        return len(sizes), sum(sizes)
    if examples is None:
        examples = _drawn_examples(loader, batches)
    return batches, batches * batch_size(first) if examples is None else int(examples)


def _drawn_examples(loader: Iterable[Batch], batches: int) -> int | None:
    """Return how many examples a DataLoader draws in an epoch; None if it does not say."""
    drawn = getattr(loader, "batch_sampler", None)
    if drawn is None:
        # Without automatic batches the dataset gives whole batches, whose size only they know.
        return None
    if type(drawn) is not BatchSampler and isinstance(drawn, Sequence):
        return sum(len(batch) for batch in drawn)
    sampler = getattr(drawn, "sampler", None)
    size = getattr(drawn, "batch_size", None)
    if isinstance(sampler, Sized):
        known = _length(sampler)
    else:
        dataset = getattr(loader, "dataset", None)
        known = _length(dataset) if isinstance(dataset, Sized) else None
    if known is None or not isinstance(size, int):
        return None
    return min(known, batches * size)


def _length(loader: Any) -> int | None:
    """Return the loader's own word; a DataLoader of a stream has ``__len__`` but cannot answer."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:
        return None


def batch_size(batch: Batch) -> int:
    """Return the examples of a batch: in lists of examples, as of detection, as many as there are entries.

    Examples
    --------
    >>> import torch
    >>> pictures, boxes = [torch.zeros(3, 8, 8)] * 5, [{"boxes": torch.zeros(2, 4)}] * 5
    >>> batch_size((pictures, boxes)), batch_size(((torch.zeros(8, 3), torch.zeros(8)), torch.zeros(8)))
    (5, 8)
    """
    inputs, targets = as_pair(batch)
    if isinstance(inputs, (tuple, list)) and isinstance(targets, (tuple, list)):
        if len(inputs) == len(targets) and not _of_all_examples([*inputs, *targets]):
            return len(inputs)
    shape = batch_shape((inputs, targets))
    return shape[0] if shape else 1


def _of_all_examples(entries: Sequence[Any]) -> bool:
    """Whether each entry holds something of every example, as of a model with several inputs and outputs."""
    lengths = {len(each) if isinstance(each, Tensor) and each.dim() else -1 for each in entries}
    return len(lengths) == 1 and -1 not in lengths


def epochs_of(loader: Iterable[Batch], epochs: int, device: Any) -> Iterator[Batch]:
    """Yield the batches of several passes over ``loader`` on ``device``."""
    for _ in range(epochs):
        for batch in loader:
            yield to_device(as_pair(batch), device)
