"""Batches of new and stored samples, the same ones at each pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_elastic.errors import StreamError
from fl_elastic.groups import Batch
from fl_elastic.streaming.growing_head import ClassMap
from fl_elastic.streaming.store.sample_store import SampleStore
from fl_elastic.streaming.stream_options import Replay

Row: TypeAlias = tuple[NDArray[Any], np.int64]
"""Sample and label."""

# Most bytes of batches that are read ahead, with one query to the file instead of one per batch.
_AHEAD_BYTES = 2**20


@dataclass(frozen=True, eq=False)
class Drawn:
    """Samples that were drawn for some rows of a batch.

    Parameters
    ----------
    rows : int
        Number of rows.
    places : array of int
        Ids in the store, or indices of new samples.
    stored : bool
        Whether ``places`` are ids in the store.
    """

    rows: int
    places: NDArray[np.int64]
    stored: bool


@dataclass(frozen=True, eq=False)
class Pool:
    """New and stored samples, from which the rows of batches are drawn.

    Parameters
    ----------
    x : array, shape (N, ...)
        New samples, as the store keeps them.
    y : array of int, shape (N,)
        Their labels.
    store : SampleStore
        Holds the other samples.
    classes : ClassMap
        Maps the label of each new or stored sample to an output.
    version : str or None
        Use only stored samples of this version; None for all.
    """

    x: NDArray[Any]
    y: NDArray[np.int64]
    store: SampleStore
    classes: ClassMap
    version: str | None = None

    def everything(self, at_once: int) -> Iterator[tuple[NDArray[Any], NDArray[np.int64]]]:
        """Yield samples and labels of all labelled samples, each once, in groups of up to ``at_once``."""
        ids = self.store.ids(version=self.version)
        for start in range(0, len(ids), at_once):
            found = self.store.take(ids[start : start + at_once].tolist())
            if len(found):
                yield np.stack([*found.x]), found.y
        for start in range(0, len(self.x), at_once):
            yield self.x[start : start + at_once], self.y[start : start + at_once]

    def draw(self, rows: int, generator: np.random.Generator, *, stored: bool) -> Drawn:
        """Draw the samples of some rows without reading them.

        If there are no stored samples, new ones are drawn instead, and the other way round.

        Raises
        ------
        StreamError
            If there are neither.
        """
        if stored or not len(self.x):
            ids = self.store.draw(rows, version=self.version, generator=generator)
            if len(ids):
                return Drawn(rows, ids, stored=True)
        if not len(self.x):
            raise StreamError("there is no labelled sample to learn from yet")
        return Drawn(rows, generator.permutation(len(self.x)), stored=False)

    def read(self, drawn: Sequence[Drawn]) -> list[list[Row]]:
        """Return the rows of each draw, reading each stored sample once.

        If a draw has fewer samples than rows, its samples repeat. If all drawn stored samples have been deleted,
        new ones are used.

        Raises
        ------
        StreamError
            If all drawn stored samples have been deleted and there is no new one.
        """
        found = self.store.take(
            {number for each in drawn if each.stored for number in each.places.tolist()}
        )
        by_id = dict(zip(found.ids.tolist(), zip(found.x, found.y, strict=True), strict=True))
        return [self._rows(each, by_id) for each in drawn]

    def _rows(self, drawn: Drawn, by_id: dict[int, Row]) -> list[Row]:
        if drawn.stored:
            rows = [by_id[number] for number in drawn.places.tolist() if number in by_id]
        else:
            rows = [(self.x[place], self.y[place]) for place in drawn.places.tolist()]
        # Stored samples may have been deleted since the draw.
        rows = rows or list(zip(self.x, self.y, strict=True))
        if not rows:
            raise StreamError("all stored samples were deleted, and there is no new one")
        return [rows[place % len(rows)] for place in range(drawn.rows)]


class ReplayLoader:
    """A loader for `ElasticTrainer` that yields a fixed number of batches of new and stored samples.

    Parameters
    ----------
    pool : Pool
        The samples to draw from.
    replay : Replay
        Numbers of new and of stored rows in a batch.
    steps : int
        Number of batches.
    seed : sequence of int
        Seed of every draw: each pass gives the same batches, as long as the store does not change.
    as_inputs : callable
        Turns kept samples into inputs for training.
    """

    def __init__(
        self,
        pool: Pool,
        replay: Replay,
        steps: int,
        seed: tuple[int, ...],
        as_inputs: Callable[[NDArray[Any]], Tensor],
    ) -> None:
        self._pool, self._replay, self._steps = pool, replay, steps
        self._seed, self._as_inputs = seed, as_inputs

    def __len__(self) -> int:
        return self._steps

    @property
    def dataset_size(self) -> int:
        """Number of rows in all batches."""
        return self._steps * self._replay.rows

    @property
    def distinct_examples(self) -> int:
        """Number of samples to draw from; an epoch uses only some of them."""
        return len(self._pool.store) + len(self._pool.x)

    def present(self) -> Iterator[Tensor]:
        """Yield the inputs of all samples that still exist; the caller may delete cached data of all others."""
        for x, _ in self._pool.everything(self._replay.rows):
            yield self._as_inputs(x)

    def __iter__(self) -> Iterator[Batch]:
        generator = np.random.default_rng(self._seed)
        return self._batches(generator)

    def _batches(self, generator: np.random.Generator) -> Iterator[Batch]:
        both = ((self._replay.new_rows, False), (self._replay.stored_rows, True))
        parts = [part for part in both if part[0]]
        left, ahead = self._steps, 1
        while left:
            ahead = min(ahead, left, self._most_ahead)
            drawn = [
                self._pool.draw(rows, generator, stored=stored)
                for _ in range(ahead)
                for rows, stored in parts
            ]
            rows = iter(self._pool.read(drawn))
            for _ in range(ahead):
                yield self._batch([row for _ in parts for row in next(rows)])
            left -= ahead
            # Read few batches at first, so that a caller that only needs the first one does not wait for all.
            ahead *= 2

    @property
    def _most_ahead(self) -> int:
        """Number of batches that may be read together."""
        example = self._pool.x[:1].nbytes * self._replay.rows
        return max(_AHEAD_BYTES // example, 1) if example else 1

    def _batch(self, rows: list[Row]) -> Batch:
        labels = np.array([label for _, label in rows], np.int64)
        outputs = self._pool.classes.outputs(labels)
        return self._as_inputs(np.stack([x for x, _ in rows])), torch.from_numpy(outputs)


class OnePass:
    """A loader of every labelled sample once, stored or new: for statistics over all data rather than for training.

    Parameters
    ----------
    pool : Pool
        The samples.
    labels : sequence of int
        Labels to include. A sample's target is the index of its label in this list.
    size : int
        Batch size; use that of training, for which costs are measured.
    as_inputs : callable
        Turns kept samples into inputs of the model.

    Raises
    ------
    StreamError
        If no sample has one of these labels.
    """

    def __init__(
        self,
        pool: Pool,
        labels: Sequence[int],
        size: int,
        as_inputs: Callable[[NDArray[Any]], Tensor],
    ) -> None:
        self._pool, self._size, self._as_inputs = pool, size, as_inputs
        self._place = {label: place for place, label in enumerate(labels)}
        self.dataset_size = sum(len(targets) for _, targets in self._rows())
        if not self.dataset_size:
            raise StreamError(f"the stream has no sample of the labels {list(labels)} yet")

    def __len__(self) -> int:
        return sum(1 for _ in self._rows())

    def __iter__(self) -> Iterator[Batch]:
        for x, targets in self._rows():
            yield self._as_inputs(x), torch.from_numpy(targets)

    def _rows(self) -> Iterator[tuple[NDArray[Any], NDArray[np.int64]]]:
        for x, y in self._pool.everything(self._size):
            known = np.array([label in self._place for label in y.tolist()], np.bool_)
            if known.any():
                yield (
                    x[known],
                    np.array([self._place[each] for each in y[known].tolist()], np.int64),
                )
