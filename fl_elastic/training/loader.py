"""Read a loader of any kind: its number of batches and examples, and its first batches."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from torch.utils.data import Dataset, IterableDataset

from fl_elastic.errors import TrainingError
from fl_elastic.groups import Batch
from fl_elastic.groups.batch import ExampleCounter, as_pair, drawn_examples, length_of
from fl_elastic.groups.forward import to_device
from fl_elastic.groups.untouched import preserved_rng
from fl_elastic.profiling.clock import Clock

_LOG = logging.getLogger("fl_elastic")
COUNT_ALL = ExampleCounter()
"""Counts the examples for a loss that ignores no other class than -100."""
READ_ONCE = (
    "the loader gave no batch when it was read again: pass a list or a DataLoader, not an iterator"
)
NO_BATCH = (
    "the loader gave no batch, or none with an example: check the client's data and batch size"
)
_MOST_BATCHES = 1_000_000
_T = TypeVar("_T")
_SHARE_FOR_COUNTING, _LEAST_SHARE = 0.1, 1e-3


@dataclass(frozen=True)
class LoaderSize:
    """Number of batches and examples that a loader gives in one epoch.

    Attributes
    ----------
    batches : int
        Batches per epoch; empty ones are counted too if the loader says its length.
    examples : int
        Examples per epoch, with or without a target that counts.
    known : bool
        Whether `examples` was counted; else it is a guess, from the batches that were read or from the first one.
    most : int, optional
        Size of the dataset that the loader draws from, if the loader tells.
    ends : bool
        Whether `batches` was counted; else there may be more.
    """

    batches: int
    examples: int
    known: bool = True
    ends: bool = True
    most: int | None = None


def first_batches(
    loader: Iterable[Batch],
    count: int,
    device: Any,
    counter: ExampleCounter = COUNT_ALL,
) -> list[Batch]:
    """Return up to ``count`` batches with examples that count, on ``device``.

    Raises
    ------
    TrainingError
        If the loader has no such batch, or is not a loader.
    """
    check_loader(loader)
    given = (as_pair(batch) for batch, counting, _ in counter.over(loader) if counting)
    batches = [to_device(pair, device) for pair in islice(given, max(count, 1))]
    if not batches:
        raise TrainingError(NO_BATCH)
    return batches


def check_loader(loader: object) -> None:
    """Raise TrainingError for an object that is not a loader of batches, such as None or a dataset of examples."""
    if not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
        raise TrainingError(
            f"the loader is {loader!r}: give a list of batches or a DataLoader, and do not let a client without "
            "such data train or evaluate"
        )
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise TrainingError(
            f"the loader is a dataset ({type(loader).__name__}), whose single examples would be taken for batches: "
            "give DataLoader(dataset, batch_size=...)"
        )


def check_rereadable(loader: object, reads: str) -> None:
    """Raise TrainingError unless this is a loader that can be read again; ``reads`` is the message's reason."""
    check_loader(loader)
    if isinstance(loader, Iterator):
        raise TrainingError(
            f"the loader is a {type(loader).__name__}, which can be read only once, and {reads}: pass a list or a "
            "DataLoader"
        )


def loader_size(
    loader: Iterable[Batch],
    first: Batch | None,
    counter: ExampleCounter = COUNT_ALL,
    seconds: float = math.inf,
    clock: Clock = time.perf_counter,
    loading: float = 0.0,
) -> LoaderSize:
    """Return the number of batches and examples per epoch, by the loader's length or else by reading it once.

    For a DataLoader they are those that its samplers, batch sampler and ``drop_last`` give.

    Parameters
    ----------
    loader : iterable of batches
        The loader of an epoch.
    first : batch, optional
        One of its batches; not needed for a loader that has to be read to be counted.
    counter : ExampleCounter
        Counts the examples of a batch.
    seconds : float
        The time that all of its batches may take. A loader of unknown length is counted for at most a tenth of that
        time, and not at all if it starts worker processes; its number of batches is then an estimate of how many
        can be read in that time.
    clock : callable
        Returns the time in seconds.
    loading : float
        Seconds that reading one batch takes; 0 if not known.

    Raises
    ------
    TrainingError
        If the loader does not know its length and has not ended after a million batches.
    """
    batches = None if isinstance(loader, (list, tuple)) else length_of(loader)
    if batches is None:
        limited = math.isfinite(seconds)
        if limited and (
            loading > _SHARE_FOR_COUNTING * seconds or getattr(loader, "num_workers", None)
        ):
            return LoaderSize(
                math.ceil(seconds / max(loading, _LEAST_SHARE * seconds)),
                _size_of(first, counter),
                known=False,
                ends=False,
            )
        sizes, empty, began = [], 0, clock()
        # A shuffled loader would otherwise use up random numbers of the training.
        with preserved_rng():
            for _, counting, size in islice(counter.over(loader), _MOST_BATCHES + 1):
                sizes.append(size)
                empty += not counting
                taken = clock() - began
                if taken > _SHARE_FOR_COUNTING * seconds:
                    most = math.ceil(seconds * len(sizes) / taken)
                    return LoaderSize(max(most, 1), sum(sizes), known=False, ends=False)
        if len(sizes) > _MOST_BATCHES:
            raise TrainingError(
                f"the loader does not know its length and gave more than {_MOST_BATCHES} batches: bound an epoch, "
                "for example with itertools.islice in a re-iterable, or give the dataset a __len__"
            )
        return LoaderSize(len(sizes) - empty, sum(sizes))
    examples: int | None = getattr(loader, "dataset_size", None)
    if examples is None and counter.count_examples is None:
        examples = drawn_examples(loader, batches)
    if examples is None:
        drawn_from = _to_draw_from(loader)
        guessed = batches * _size_of(first, counter)
        return LoaderSize(
            batches, min(guessed, drawn_from or guessed), known=False, most=drawn_from
        )
    return LoaderSize(batches, int(examples))


def _size_of(first: Batch | None, counter: ExampleCounter) -> int:
    return 0 if first is None else counter.all_of(first)


def says_its_length(loader: Iterable[Batch]) -> bool:
    """Return whether a loader has a length, so that it need not be read to count its batches."""
    return isinstance(loader, (list, tuple)) or length_of(loader) is not None


def _to_draw_from(loader: object) -> int | None:
    """Return the size of the dataset from which a DataLoader draws batches; None if it is not known."""
    dataset, drawn = getattr(loader, "dataset", None), getattr(loader, "batch_sampler", None)
    return length_of(dataset) if drawn is not None else None


def within(batches: Iterable[_T], seconds: float) -> Iterator[_T]:
    """Yield batches, at least one, while another one is likely to be read and processed within ``seconds``.

    Each batch is expected to take as long as the longest so far.

    Examples
    --------
    >>> list(within([1, 2, 3], math.inf)), list(within([1, 2, 3], -1.0))
    ([1, 2, 3], [1])
    """
    started = time.monotonic()
    until, longest = started + seconds, 0.0
    for batch in batches:
        yield batch
        now = time.monotonic()
        longest, started = max(longest, now - started), now
        if now + longest > until:
            return
