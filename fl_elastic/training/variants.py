"""A dataset with a few fixed random variants of each example: augmentation that a feature store can keep."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from fl_elastic.errors import TrainingError
from fl_elastic.groups.untouched import preserved_rng

__all__ = ["Variants"]


class Variants(Dataset[tuple[Tensor, Any]]):
    """Draws one of ``count`` variants of an example each time it is asked for.

    Which variant is drawn is random (torch's generator). The variant itself depends only on the seed, the example
    and the variant's number, so that it comes back unchanged and its features can be cached.

    Parameters
    ----------
    dataset : sized dataset of (Tensor, target)
        The examples.
    augment : callable
        Random change of one input, drawing from torch's generator.
    count : int
        Variants of each example.
    seed : int
        Seed of the variants.

    Examples
    --------
    >>> flipped = Variants([(torch.arange(3.0), 0)], lambda x: x + torch.rand(3), count=2, seed=1)
    >>> len({tuple(flipped[0][0].tolist()) for _ in range(50)})
    2
    """

    def __init__(
        self, dataset: Any, augment: Callable[[Tensor], Tensor], *, count: int, seed: int = 0
    ) -> None:
        if count < 1:
            raise TrainingError(f"count {count} must be at least 1 variant of each example")
        self._dataset = dataset
        self._augment = augment
        self._count = count
        self._seed = seed

    def __len__(self) -> int:
        return len(self._dataset) if isinstance(self._dataset, Sized) else 0

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        inputs, target = self._dataset[index]
        variant = int(torch.randint(self._count, ()))
        with preserved_rng():
            torch.manual_seed(hash((self._seed, index, variant)) % (1 << 63))
            return self._augment(inputs), target
