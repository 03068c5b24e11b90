"""The batches of a fit: several passes over a loader, on a device."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from fl_elastic.errors import TrainingError
from fl_elastic.groups import Batch
from fl_elastic.groups.batch import ExampleCounter, as_pair
from fl_elastic.groups.forward import batch_shape, to_device
from fl_elastic.profiling.clock import Clock
from fl_elastic.training.loader import (
    COUNT_ALL,
    NO_BATCH,
    READ_ONCE,
    LoaderSize,
    check_rereadable,
    loader_size,
    says_its_length,
)

_LOG = logging.getLogger("fl_elastic")


@dataclass(frozen=True, eq=False)
class FitBatches:
    """The batches of a fit, with their number, and the shape and reading time of the first ones.

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
        The first batches, for a probe.
    shape : tuple of int
        Shape of the first batch.
    requested_steps : int
        Number of batches in all passes.
    distinct_examples : int
        Number of different examples: a stream has more samples than it draws for an epoch.
    loading_seconds : float, optional
        Expected time to read a batch; None if reading does not count towards the budget.
    """

    loader: Iterable[Batch]
    epochs: int
    passes: Epochs
    size: LoaderSize
    first: list[Batch]
    shape: tuple[int, ...]
    requested_steps: int
    distinct_examples: int
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
        passes = Epochs(loader, epochs, device, counter)
        size: LoaderSize | None = None
        if deadline is None and not says_its_length(loader):
            # Before reading for training begins, so that its worker processes do not compete with this count.
            size = loader_size(loader, None, counter)
        first = passes.first(count)
        loading = (clock() - began) / len(first) if timed else None
        shape = batch_shape(first[0])
        if size is None:
            limit = math.inf if deadline is None else deadline
            size = loader_size(loader, first[0], counter, limit, clock, loading or 0.0)
        if size.batches == 0:
            raise TrainingError(READ_ONCE)
        steps = size.batches * epochs
        distinct = max(size.examples, getattr(loader, "distinct_examples", 0))
        return cls(loader, epochs, passes, size, first, shape, steps, distinct, loading)

    def counted(self) -> int:
        """Return the number of examples in a pass, after the fit; warn if the loader's length was too small."""
        if self.size.ends and self.passes.batches > self.size.batches:
            _LOG.warning(
                "the loader's __len__ is %s batches, but it gives more: a fit takes that many steps and leaves out "
                "the rest. Correct __len__, or remove it", self.size.batches,
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
        If it is not a loader, or can be read only once.
    """

    def __init__(
        self,
        loader: Iterable[Batch],
        epochs: int,
        device: Any,
        counter: ExampleCounter = COUNT_ALL,
    ) -> None:
        check_rereadable(loader, "training reads it again for each pass")
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
        """Return how many examples of an epoch have a target that counts.

        The loader's length and the examples read both bound this number. If the first pass has not ended, the share
        of examples that count is extrapolated to the whole epoch.
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
