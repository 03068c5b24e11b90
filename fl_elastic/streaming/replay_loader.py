"""Batches of new and stored samples, the same ones each time they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_elastic.errors import StreamError
from fl_elastic.groups import Batch
from fl_elastic.streaming.head import ClassMap
from fl_elastic.streaming.replay import Part, Replay
from fl_elastic.streaming.store import SampleStore

__all__ = ["Pool", "ReplayLoader"]


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

    def rows(
        self, part: Part, how: str, generator: np.random.Generator
    ) -> tuple[NDArray[Any], NDArray[np.int64], list[NDArray[np.float32] | None]]:
        """Return inputs, labels and known scores of exactly as many rows as the part has.

        Where there are fewer samples they repeat; where there are no stored or no new ones the others stand in.

        Raises
        ------
        StreamError
            If there is neither.
        """
        if part.stored or not len(self.x):
            found = self.store.sample(part.rows, how=how, version=self.version, generator=generator)
            if len(found):
                places = np.resize(np.arange(len(found)), part.rows)
                told = self._told(found.ids, found.outputs) if part.distils else [None] * len(found)
                return found.x[places], found.y[places], [told[place] for place in places]
        if not len(self.x):
            raise StreamError("there is no labelled sample to learn from yet")
        places = np.resize(generator.permutation(len(self.x)), part.rows)
        return self.x[places], self.y[places], [None] * part.rows

    def _told(
        self, ids: NDArray[np.int64], outputs: NDArray[np.float32] | None
    ) -> list[NDArray[np.float32] | None]:
        """Return what was said of each sample; one by one where there were fewer classes for some."""
        if outputs is not None:
            return list(outputs)
        singly = [self.store.take([each]).outputs for each in ids.tolist()]
        return [None if each is None or not len(each) else each[0] for each in singly]


class ReplayLoader:
    """A loader for `ElasticTrainer`: so many batches by a recipe.

    Parameters
    ----------
    pool : Pool
        Where rows come from.
    replay : Replay
        The recipe.
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
        return self._steps * self._replay.batch_size

    def __iter__(self) -> Iterator[Batch]:
        generator = np.random.default_rng(self._seed)
        return (self._batch(generator) for _ in range(self._steps))

    def _batch(self, generator: np.random.Generator) -> Batch:
        replay, classes = self._replay, self._pool.classes
        drawn = [self._pool.rows(part, replay.how, generator) for part in replay.parts]
        x = np.concatenate([rows for rows, _, _ in drawn])
        outputs = classes.outputs(np.concatenate([labels for _, labels, _ in drawn]))
        told = None
        if replay.needs_outputs:
            told = torch.full((len(x), len(classes)), torch.nan)
            for place, scores in enumerate(scores for _, _, many in drawn for scores in many):
                if scores is not None:
                    known = scores[: len(classes)]
                    told[place, : len(known)] = torch.from_numpy(known.copy())
        return self._as_inputs(x), replay.targets(torch.from_numpy(outputs), told)
