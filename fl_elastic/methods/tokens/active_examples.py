"""Train on the examples that a model still forgets, and leave out those that it never forgets."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Sampler

from fl_elastic.errors import TrainingError

Indices = NDArray[np.int64]


class ForgettingCounts:
    """Counts how often each example was classified right and, the next time that it was shown, wrong.

    Presentations are counted instead of epochs, so that passes over a part of the data and streams work as well.

    Parameters
    ----------
    examples : int
        Number of examples, which are identified by their index.

    Examples
    --------
    >>> counts = ForgettingCounts(3)
    >>> for right in ([1, 0, 1], [0, 0, 1], [1, 0, 1], [0, 0, 1]):
    ...     counts.note([0, 1, 2], right)
    >>> counts.events.tolist(), counts.never_right.tolist()
    ([2, 0, 0], [False, True, False])
    """

    def __init__(self, examples: int) -> None:
        self.events = np.zeros(examples, dtype=np.int64)
        self._right = np.zeros(examples, dtype=bool)
        self._ever = np.zeros(examples, dtype=bool)

    @property
    def never_right(self) -> NDArray[np.bool_]:
        """Whether each example was never right, or never shown, so far; shape (N,)."""
        return ~self._ever

    def note(
        self, examples: Sequence[int] | Indices, right: Sequence[bool] | NDArray[np.bool_]
    ) -> None:
        """Record whether the model was right on these examples; an index may occur several times."""
        for example, now in zip(
            np.asarray(examples).tolist(), np.asarray(right).tolist(), strict=True
        ):
            self.events[example] += self._right[example] and not now
            self._right[example] = bool(now)
            self._ever[example] |= bool(now)

    def grow(self, examples: int) -> None:
        """Extend the counts to ``examples`` examples; new ones come after those known."""
        more = examples - len(self.events)
        for name in ("events", "_right", "_ever"):
            setattr(self, name, np.pad(getattr(self, name), (0, more)))

    def clear(self) -> None:
        """Set all counts and flags to zero."""
        for each in (self.events, self._right, self._ever):
            each[:] = 0


def swapped(
    active: Indices,
    aside: Indices,
    counts: ForgettingCounts,
    count: int,
    generator: np.random.Generator,
) -> tuple[Indices, Indices]:
    """Swap ``count`` active examples for ones that are aside; return both index arrays.

    The rule of Tri-Level E-ViT (Kong et al., AAAI 2023): the active examples that were forgotten least are appended
    to those aside, and as many of these, drawn at random, become active. Examples that were never right count as
    forgotten most. Ties are broken by position.

    Parameters
    ----------
    active, aside : array of int
        Indices of examples, each once.
    counts : ForgettingCounts
        Counts of all examples.
    count : int
        Number of examples to swap; at most as many as are aside are swapped.
    generator : numpy.random.Generator
        Source of randomness.

    Examples
    --------
    >>> counts = ForgettingCounts(6)
    >>> for right in ([1, 1, 0, 1], [0, 1, 0, 1]):
    ...     counts.note([0, 1, 2, 3], right)
    >>> active, aside = swapped(np.arange(4), np.array([4, 5]), counts, 2, np.random.default_rng(0))
    >>> sorted(active.tolist()), aside.tolist()
    ([0, 2, 4, 5], [1, 3])
    """
    count = min(count, len(aside), len(active))
    worth = np.where(counts.never_right, counts.events.max(initial=0) + 1, counts.events)
    going = np.argsort(worth[active], kind="stable")[:count]
    coming = generator.choice(len(aside), size=count, replace=False)
    return (
        np.concatenate([np.delete(active, going), aside[coming]]),
        np.concatenate([np.delete(aside, coming), active[going]]),
    )


class ActiveExamples(Sampler[list[int]]):
    """Draws batches of the active examples, and swaps those that are never forgotten for others.

    For ``DataLoader(dataset, batch_sampler=...)``. `ElasticTrainer` reports on which examples of each batch the
    model was right, before the step; your own training loop does so by `judge`. The sampler is used over several
    fits. If examples come as a stream, call `grow` for new examples and `leave` for those that are gone.

    Parameters
    ----------
    examples : int
        Number of examples in the dataset.
    batch_size : int
        Size of each batch except the last.
    aside : float
        Share of the examples that are not used at any time, in (0, 1).
    swap : float
        Share of the examples that are swapped at once, in (0, 1); at least one is.
    every : int
        Number of passes over the active examples between two swaps. The paper uses 30 of 300 epochs; with few
        passes use a tenth of them.
    swaps : int, optional
        Number of swaps, after which the active examples stay. None for a stream, which has no last swap.
    seed : int
        Seed of the random draws.

    Raises
    ------
    TrainingError
        If a parameter is impossible.

    Examples
    --------
    >>> sampler = ActiveExamples(10, batch_size=4, aside=0.2, swap=0.1, every=1, seed=0)
    >>> [len(batch) for batch in sampler], len(sampler)
    ([4, 4], 2)
    """

    def __init__(
        self,
        examples: int,
        batch_size: int,
        *,
        aside: float = 0.2,
        swap: float = 0.05,
        every: int = 30,
        swaps: int | None = 5,
        seed: int = 0,
    ) -> None:
        if batch_size < 1 or every < 1 or (swaps is not None and swaps < 0):
            raise TrainingError(
                f"batch_size {batch_size} and every {every} must be at least 1, swaps {swaps} at least 0"
            )
        if not (0 < aside < 1 and 0 < swap < 1):
            raise TrainingError(f"aside {aside} and swap {swap} are shares above 0 and below 1")
        out = round(aside * examples)
        if not 0 < out < examples:
            raise TrainingError(
                f"{aside:.3g} of {examples} examples leaves none aside or none in use: use the dataset as it is"
            )
        self.batch_size = batch_size
        self.counts = ForgettingCounts(examples)
        self._generator = np.random.default_rng(seed)
        order = self._generator.permutation(examples)
        self.aside, self.active = order[:out], order[out:]
        self._share_aside, self._share_swapped = aside, swap
        self._every, self._left = every, swaps
        self._judged = 0
        self._given: deque[list[int]] = deque()

    @property
    def sampler(self) -> Indices:
        """The active examples, under the name that a DataLoader expects in a batch sampler."""
        return self.active

    @property
    def _swap(self) -> int:
        # At least one: with few examples the published share is less than one, and nothing would ever be swapped.
        return max(1, round(self._share_swapped * (len(self.active) + len(self.aside))))

    def __len__(self) -> int:
        """Return the number of batches in a pass."""
        return -(-len(self.active) // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of a pass in random order; a swap that is due is done first."""
        self._given.clear()
        if self._left != 0 and self._judged >= self._every * len(self.active):
            self.active, self.aside = swapped(
                self.active, self.aside, self.counts, self._swap, self._generator
            )
            self.counts.clear()
            self._judged = 0
            self._left = None if self._left is None else self._left - 1
        order = self._generator.permutation(self.active)
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size].tolist()
            self._given.append(batch)
            yield batch

    def grow(self, examples: int) -> None:
        """Note that the dataset has grown to ``examples`` examples; the same share of the new ones is put aside.

        Takes effect from the next pass on.

        Raises
        ------
        TrainingError
            If the dataset had more examples before.
        """
        known = len(self.counts.events)
        if examples < known:
            raise TrainingError(
                f"the dataset had {known} examples and cannot have {examples}: tell leave() what is gone"
            )
        self.counts.grow(examples)
        new = known + self._generator.permutation(examples - known)
        # By the share of all examples, or examples that come one by one would never go aside.
        there = len(self.active) + len(self.aside) + len(new)
        out = min(max(round(self._share_aside * there) - len(self.aside), 0), len(new))
        self.aside = np.concatenate([self.aside, new[:out]])
        self.active = np.concatenate([self.active, new[out:]])

    def leave(self, examples: Sequence[int] | Indices) -> None:
        """Stop drawing these examples from the next pass on; their indices are not reused.

        Raises
        ------
        TrainingError
            If no example would be left active.
        """
        active = self.active[~np.isin(self.active, examples)]
        aside = self.aside[~np.isin(self.aside, examples)]
        if not len(active):
            raise TrainingError("no example would be left in use: grow() the sampler first")
        self.active, self.aside = active, aside

    def judge(self, right: torch.Tensor) -> None:
        """Record on which examples of the next batch, in the order in which they were drawn, the model was right.

        Parameters
        ----------
        right : Tensor of bool
            Shape (B,).

        Raises
        ------
        TrainingError
            If no batch is waiting to be judged, or the batch had another number of examples.
        """
        if not self._given or len(self._given[0]) != len(right):
            drawn = len(self._given[0]) if self._given else 0
            raise TrainingError(f"{len(right)} examples were judged where the sampler drew {drawn}")
        self.counts.note(self._given.popleft(), right.cpu().numpy())
        self._judged += len(right)
