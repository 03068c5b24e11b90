"""Read a loader of any kind: how many batches, how many examples, the first few of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from fl_elastic.errors import TrainingError
from fl_elastic.groups import Batch
from fl_elastic.groups.batch_size import CountExamples, batch_size, counted, drawn_examples
from fl_elastic.groups.forward import to_device
from fl_elastic.groups.pairs import as_pair

__all__ = [
    "Epochs",
    "LoaderSize",
    "first_batches",
    "loader_size",
    "refuse_nothing",
]


@dataclass(frozen=True)
class LoaderSize:
    """What a loader gives in one epoch.

    Attributes
    ----------
    batches : int
        Those of no examples among them where the loader says its length.
    examples : int
        Of all batches together.
    known : bool
        Whether the examples are counted; else they are those of the first batch times the batches.
    """

    batches: int
    examples: int
    known: bool = True


_MOST_BATCHES = 1_000_000


def first_batches(
    loader: Iterable[Batch],
    count: int,
    device: Any,
    count_examples: CountExamples | None = None,
) -> list[Batch]:
    """Return up to ``count`` batches that have examples, on ``device``.

    Raises
    ------
    TrainingError
        If the loader has none, or is none.
    """
    refuse_nothing(loader)
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise TrainingError(
            f"the loader is a dataset ({type(loader).__name__}), whose single examples would be taken for batches: "
            "give DataLoader(dataset, batch_size=...)"
        )
    given = (as_pair(batch) for batch, size in counted(loader, count_examples) if size)
    batches = [to_device(pair, device) for pair in islice(given, max(count, 1))]
    if not batches:
        raise TrainingError(
            "the loader gave no batch, or none with an example: check the client's data and batch size"
        )
    return batches


def refuse_nothing(loader: object) -> None:
    """Raise TrainingError for what cannot be read, such as None of a client without such data."""
    if not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
        raise TrainingError(
            f"the loader is {loader!r}: give a list of batches or a DataLoader, and do not ask a client "
            "for what it has no data for"
        )


def loader_size(
    loader: Iterable[Batch], first: Batch, count_examples: CountExamples | None = None
) -> LoaderSize:
    """Return batches and examples per epoch, by the loader's own word or else by counting once.

    Samplers, ``drop_last`` and own batch samplers of a DataLoader count as they draw.

    Parameters
    ----------
    loader : iterable of batches
        What an epoch reads.
    first : batch
        One that it gave.
    count_examples : callable, optional
        See `fl_elastic.groups.batch_size.batch_size`.

    Raises
    ------
    TrainingError
        If the loader does not know its length and has not ended after a million batches.
    """
    batches = None if isinstance(loader, (list, tuple)) else _length(loader)
    if batches is None:
        sizes = [size for _, size in islice(counted(loader, count_examples), _MOST_BATCHES + 1)]
        if len(sizes) > _MOST_BATCHES:
            raise TrainingError(
                f"the loader does not know its length and gave more than {_MOST_BATCHES} batches: bound an epoch, "
                "for example with itertools.islice in a re-iterable, or give the dataset a __len__"
            )
        return LoaderSize(sum(1 for size in sizes if size), sum(sizes))
    examples = getattr(loader, "dataset_size", None)
    if examples is None and count_examples is None:
        examples = drawn_examples(loader, batches)
    if examples is None:
        return LoaderSize(batches, batches * batch_size(first, count_examples), known=False)
    return LoaderSize(batches, int(examples))


def _length(loader: Any) -> int | None:
    """Return the loader's own word; a DataLoader of a stream has ``__len__`` but cannot answer."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:
        return None


class Epochs:
    """The batches of several passes over a loader, on a device; those of no examples are passed over.

    Parameters
    ----------
    loader : iterable of batches
        Read anew for each pass.
    epochs : int
        Passes.
    device : device
        Where the batches go.
    count_examples : callable, optional
        See `fl_elastic.groups.batch_size.batch_size`.

    Attributes
    ----------
    first_pass : int
        Examples of the first pass so far.
    passed : bool
        Whether the first pass has ended.
    """

    def __init__(
        self,
        loader: Iterable[Batch],
        epochs: int,
        device: Any,
        count_examples: CountExamples | None = None,
    ) -> None:
        self.first_pass = 0
        self.passed = False
        self._loader, self._epochs, self._device = loader, epochs, device
        self._count_examples = count_examples

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(self._epochs):
            for batch, size in counted(self._loader, self._count_examples):
                if not size:
                    continue
                self.first_pass += 0 if self.passed else size
                yield to_device(as_pair(batch), self._device)
            self.passed = True

    def examples(self, size: LoaderSize) -> int:
        """Return how many examples an epoch has: by the loader's word, but never more than were met."""
        if self.passed:
            return min(size.examples, self.first_pass) if size.known else self.first_pass
        return size.examples if size.known else self.first_pass
