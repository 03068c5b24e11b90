"""Read a loader of any kind: how many batches, how many examples, the first few of them."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from fl_elastic.errors import TrainingError
from fl_elastic.groups import Batch
from fl_elastic.groups.batch import ExampleCounter, as_pair, drawn_examples, length_of
from fl_elastic.groups.forward import batch_shape, to_device
from fl_elastic.groups.untouched import preserved_rng
from fl_elastic.profiling.clock import Clock

_LOG = logging.getLogger("fl_elastic")
Judge = Callable[[Tensor], None]
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
    """What a loader gives in one epoch.

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
    refuse_what_is_none(loader)
    given = (as_pair(batch) for batch, counting, _ in counter.over(loader) if counting)
    batches = [to_device(pair, device) for pair in islice(given, max(count, 1))]
    if not batches:
        raise TrainingError(NO_BATCH)
    return batches


def refuse_what_is_none(loader: object) -> None:
    """Raise TrainingError for an object that is no loader of batches: one that is not iterable, or a dataset."""
    refuse_nothing(loader)
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise TrainingError(
            f"the loader is a dataset ({type(loader).__name__}), whose single examples would be taken for batches: "
            "give DataLoader(dataset, batch_size=...)"
        )


def refuse_iterator(loader: object, reads: str) -> None:
    """Raise TrainingError for no loader, or one that can be read only once; ``reads`` says what reads it."""
    refuse_what_is_none(loader)
    if isinstance(loader, Iterator):
        raise TrainingError(
            f"the loader is a {type(loader).__name__}, which can be read only once, and {reads}: pass a list or a "
            "DataLoader"
        )


def refuse_nothing(loader: object) -> None:
    """Raise TrainingError for an object that cannot be iterated over, such as the None of a client without data."""
    if not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
        raise TrainingError(
            f"the loader is {loader!r}: give a list of batches or a DataLoader, and do not ask a client "
            "for what it has no data for"
        )


def loader_size(
    loader: Iterable[Batch],
    first: Batch | None,
    counter: ExampleCounter = COUNT_ALL,
    seconds: float = math.inf,
    clock: Clock = time.perf_counter,
    loading: float = 0.0,
) -> LoaderSize:
    """Return batches and examples per epoch, as the loader says, or else by counting once.

    The samplers, ``drop_last`` and batch samplers of a DataLoader are counted by what they draw.

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
        Seconds that reading one batch takes, as far as they are known.

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
        # A shuffled loader draws random numbers, which are those of training.
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
    """Return whether a loader says how many batches it has, so that it need not be read to count them."""
    return isinstance(loader, (list, tuple)) or length_of(loader) is not None


def _to_draw_from(loader: object) -> int | None:
    """Return the size of the dataset that a DataLoader draws batches from; None if it does not draw or say."""
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


@dataclass(frozen=True, eq=False)
class FitBatches:
    """The batches of a fit, and what its first ones show.

    Attributes
    ----------
    loader : iterable of batches
        As given.
    epochs : int
        Passes over it.
    passes : Epochs
        The batches of all passes.
    size : LoaderSize
        Size of one pass.
    first : list of batch
        Batches of a probe.
    shape : tuple of int
        Shape of the first one.
    requested_steps : int
        Number of batches in all passes.
    distinct_examples : int
        Number of different examples: a stream has more samples than it draws for an epoch.
    judge : callable, optional
        Told what the model gets right in each batch, for a sampler that depends on it.
    loading_seconds : float, optional
        Expected time to read a batch; None if it does not count.
    """

    loader: Iterable[Batch]
    epochs: int
    passes: Epochs
    size: LoaderSize
    first: list[Batch]
    shape: tuple[int, ...]
    requested_steps: int
    distinct_examples: int
    judge: Judge | None
    loading_seconds: float | None

    @classmethod
    def read(
        cls,
        loader: Iterable[Batch],
        epochs: int,
        device: Any,
        counter: ExampleCounter,
        count: int,
        clock: Clock,
        deadline: float | None,
        *,
        timed: bool,
    ) -> FitBatches:
        """Read the first ``count`` batches, and count the loader if it does not say its length.

        Parameters
        ----------
        loader, epochs, device, counter
            As in `Epochs`.
        count : int
            Number of batches for a probe.
        clock : callable
            Returns the time in seconds.
        deadline : float, optional
            Time that all batches may take.
        timed : bool
            Whether the time of reading counts.

        Raises
        ------
        TrainingError
            If the loader is empty or can be read only once.
        """
        began = clock()
        size: LoaderSize | None = None
        if deadline is None and not says_its_length(loader):
            # Before reading for training begins, so that its worker processes do not compete with this count.
            refuse_what_is_none(loader)
            size = loader_size(loader, None, counter)
        passes = Epochs(loader, epochs, device, counter)
        # A sampler that depends on what the model gets right; of a DataLoader, or the loader itself.
        drawn = getattr(loader, "batch_sampler", None)
        judge = getattr(loader, "judge", None) or getattr(drawn, "judge", None)
        if judge is None:
            first = passes.first(count)
        else:
            # Such a sampler is told the result on each batch before it draws the next one.
            first = first_batches(loader, count, device, counter)
        loading = (clock() - began) / len(first) if timed else None
        shape = batch_shape(first[0])
        if size is None:
            limit = math.inf if deadline is None else deadline
            size = loader_size(loader, first[0], counter, limit, clock, loading or 0.0)
        if size.batches == 0:
            raise TrainingError(READ_ONCE)
        steps = size.batches * epochs
        distinct = max(size.examples, getattr(loader, "distinct_examples", 0))
        return cls(
            loader, epochs, passes, size, first, shape, steps, distinct, judge, loading
        )  # fmt: skip

    def counted(self) -> int:
        """Return the number of examples in a pass, after it; warn if it had more batches than the loader said."""
        if self.size.ends and self.passes.batches > self.size.batches:
            _LOG.warning(
                "the loader says that it has %s batches, and gives more: a fit takes as many steps as it says, and "
                "leaves out the rest. Let its __len__ be right, or leave that out", self.size.batches,
            )  # fmt: skip
        return self.passes.examples(self.size)


class Epochs(Iterator[Batch]):
    """The batches of several passes over a loader, on a device; batches without examples are skipped.

    Parameters
    ----------
    loader : iterable of batches
        Read anew for each pass.
    epochs : int
        Passes.
    device : device
        Where the batches go.
    counter : ExampleCounter
        Counts the examples of a batch.

    Attributes
    ----------
    first_pass : int
        Examples with a target that counts, read so far in the first pass.
    passed : bool
        Whether the first pass has ended.
    read_before : bool
        Whether the batch given last had been read ahead by `first`.
    batches : int
        Batches with examples read so far in the first pass.
    counting : int
        Examples of the batch given last that count.

    Raises
    ------
    TrainingError
        If the loader is no loader, or can be read only once.
    """

    def __init__(
        self,
        loader: Iterable[Batch],
        epochs: int,
        device: Any,
        counter: ExampleCounter = COUNT_ALL,
    ) -> None:
        refuse_what_is_none(loader)
        if isinstance(loader, Iterator):
            raise TrainingError(READ_ONCE)
        self.first_pass = self.batches = self.counting = self._drawn = 0
        self.passed = False
        self._loader, self._epochs, self._device = loader, epochs, device
        self._counter = counter
        self.read_before = False
        self._read = self._passes()
        self._ahead: deque[tuple[Batch, int]] = deque()

    def first(self, count: int) -> list[Batch]:
        """Return up to ``count`` of the first batches; iteration gives them again.

        Raises
        ------
        TrainingError
            If there is no batch.
        """
        self._ahead.extend(islice(self._read, max(count - len(self._ahead), 0)))
        if not self._ahead:
            raise TrainingError(NO_BATCH)
        return [batch for batch, _ in islice(self._ahead, count)]

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        self.read_before = bool(self._ahead)
        batch, self.counting = self._ahead.popleft() if self._ahead else next(self._read)
        return batch

    def close(self) -> None:
        """Release the loader, so that its worker processes end now and not at garbage collection."""
        self._read.close()

    def examples(self, size: LoaderSize) -> int:
        """Return how many examples of an epoch count, by the loader's length, but never more than were read.

        If the first pass has not ended, as large a share of the others is expected to count.
        """
        met = self.first_pass if size.most is None else min(self.first_pass, size.most)
        if not size.known:
            return met
        if self.passed:
            return min(size.examples, met)
        return round(size.examples * self.first_pass / max(self._drawn, 1))

    def _passes(self) -> Generator[tuple[Batch, int], None, None]:
        for _ in range(self._epochs):
            for batch, size, drawn in self._counter.over(self._loader):
                self._drawn += 0 if self.passed else drawn
                if not size:
                    continue
                self.first_pass += 0 if self.passed else size
                self.batches += not self.passed
                yield to_device(as_pair(batch), self._device), size
            self.passed = True
