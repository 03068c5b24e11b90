"""Batches of new and stored samples, the same ones each time they are read."""

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
from fl_elastic.streaming.head import ClassMap
from fl_elastic.streaming.replay import Replay
from fl_elastic.streaming.store.sample_store import SampleStore

__all__ = ["Drawn", "OnePass", "Pool", "ReplayLoader", "Row"]

Row: TypeAlias = tuple[NDArray[Any], np.int64]
"""Sample and label."""

# Batches are read ahead, up to so many bytes: one question to the file instead of one for each of them.
_AHEAD_BYTES = 2**20


@dataclass(frozen=True, eq=False)
class Drawn:
    """Samples that some rows of a batch are to have.

    Parameters
    ----------
    rows : int
        How many rows.
    places : array of int
        Ids in the store, or places among the new samples.
    stored : bool
        Which of the two.
    """

    rows: int
    places: NDArray[np.int64]
    stored: bool


@dataclass(frozen=True, eq=False)
class Pool:
    """Where rows come from.

    Parameters
    ----------
    x : array, shape (N, ...)
        New samples, as the store keeps them.
    y : array of int, shape (N,)
        Their labels.
    store : SampleStore
        Of the others.
    classes : ClassMap
        Knows every label of both.
    version : str or None
        Only stored samples of this version; None for all.
    """

    x: NDArray[Any]
    y: NDArray[np.int64]
    store: SampleStore
    classes: ClassMap
    version: str | None = None

    def everything(self, at_once: int) -> Iterator[tuple[NDArray[Any], NDArray[np.int64]]]:
        """Yield samples and labels of all labelled ones, each once, in groups of up to ``at_once``."""
        ids = self.store.ids(version=self.version)
        for start in range(0, len(ids), at_once):
            found = self.store.take(ids[start : start + at_once].tolist())
            if len(found):
                yield np.stack([*found.x]), found.y
        for start in range(0, len(self.x), at_once):
            yield self.x[start : start + at_once], self.y[start : start + at_once]

    def draw(self, rows: int, generator: np.random.Generator, *, stored: bool) -> Drawn:
        """Return which samples some rows are to have; none is read yet.

        Where there are no stored or no new ones the others stand in.

        Raises
        ------
        StreamError
            If there is neither.
        """
        if stored or not len(self.x):
            ids = self.store.draw(rows, version=self.version, generator=generator)
            if len(ids):
                return Drawn(rows, ids, stored=True)
        if not len(self.x):
            raise StreamError("there is no labelled sample to learn from yet")
        return Drawn(rows, generator.permutation(len(self.x)), stored=False)

    def read(self, drawn: Sequence[Drawn]) -> list[list[Row]]:
        """Return as many rows of each as were drawn for, reading each stored sample once.

        Where there are fewer samples they repeat; for stored ones that are all gone new ones stand in.

        Raises
        ------
        StreamError
            If all stored ones are gone by now, and there is no new one.
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
        # They may have been deleted meanwhile.
        rows = rows or list(zip(self.x, self.y, strict=True))
        if not rows:
            raise StreamError("every stored sample is gone, and there is no new one")
        return [rows[place % len(rows)] for place in range(drawn.rows)]


class ReplayLoader:
    """A loader for `ElasticTrainer`: so many batches of new and stored samples.

    Parameters
    ----------
    pool : Pool
        Where rows come from.
    replay : Replay
        How many rows of a batch are new and how many stored.
    steps : int
        Batches.
    seed : sequence of int
        Of every draw: reading the loader again gives the same batches, as long as the store is the same.
    as_inputs : callable
        Turns rows as they are kept into what is trained on.
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
        """Rows of all batches."""
        return self._steps * self._replay.rows

    @property
    def distinct_examples(self) -> int:
        """How many samples there are to draw from, of which an epoch meets a part."""
        return len(self._pool.store) + len(self._pool.x)

    def present(self) -> Iterator[Tensor]:
        """Yield the inputs of every sample that there is: what was made of others may go."""
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
            # Who wants the first batch only, does not wait for all of them.
            ahead *= 2

    @property
    def _most_ahead(self) -> int:
        """How many batches may be read together."""
        example = self._pool.x[:1].nbytes * self._replay.rows
        return max(_AHEAD_BYTES // example, 1) if example else 1

    def _batch(self, rows: list[Row]) -> Batch:
        labels = np.array([label for _, label in rows], np.int64)
        outputs = self._pool.classes.outputs(labels)
        return self._as_inputs(np.stack([x for x, _ in rows])), torch.from_numpy(outputs)


class OnePass:
    """Every labelled sample once, stored or new: for what is counted over all data instead of trained on.

    Parameters
    ----------
    pool : Pool
        Where they are.
    labels : sequence of int
        A target is a label's place here; samples of other labels are left out.
    size : int
        Of a batch; costs are known by the batches that are trained on.
    as_inputs : callable
        Turns samples as they are kept into what the model takes.

    Raises
    ------
    StreamError
        If there is no sample of these labels.
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
