"""Few-shot episodes: classes, number of examples of each, and pseudo-queries for adaptation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_elastic.errors import DatasetError
from fl_elastic.groups import Batch

__all__ = ["Episode", "PseudoQueries", "augmented", "sample_episode"]

_MOST_WAYS, _FEWEST_WAYS = 50, 5
_MOST_SUPPORT, _MOST_QUERIES, _COUNTED = 500, 10, 100
_CHANCE = 0.9


@dataclass(frozen=True, eq=False)
class Episode:
    """One few-shot task: indices into a dataset, and classes numbered from 0.

    Attributes
    ----------
    support, query : array of int
        Indices of the examples for adaptation, and for testing.
    support_classes, query_classes : array of int
        Class of each of them, in 0 .. ways - 1.
    """

    support: NDArray[np.int64]
    support_classes: NDArray[np.int64]
    query: NDArray[np.int64]
    query_classes: NDArray[np.int64]

    @property
    def ways(self) -> int:
        """Number of classes."""
        return int(self.support_classes.max()) + 1


def sample_episode(
    labels: NDArray[np.int64],
    generator: np.random.Generator,
    *,
    most_ways: int = _MOST_WAYS,
    most_support: int = _MOST_SUPPORT,
) -> Episode:
    """Draw an episode as in Meta-Dataset: varying ways, unbalanced shots, balanced queries.

    Ways are uniform between 5 and the number of classes. There are up to 10 queries per class, but at most half of
    the smallest class. The size of the support set follows from a uniform share of the classes' sizes. Shots are
    proportional to the classes' sizes times a factor between a half and two (Triantafillou et al., ICLR 2020).

    Parameters
    ----------
    labels : array of int, shape (n,)
        Class of every example.
    generator : numpy.random.Generator
        The only source of randomness.
    most_ways, most_support : int
        Upper bounds for the numbers of classes and of support examples.

    Raises
    ------
    DatasetError
        If fewer than five classes have two or more examples.
    """
    values, counts = np.unique(labels, return_counts=True)
    values, counts = values[counts >= 2], counts[counts >= 2]
    if len(values) < _FEWEST_WAYS:
        raise DatasetError(
            f"an episode needs {_FEWEST_WAYS} classes of two examples or more, there are {len(values)}"
        )
    ways = int(generator.integers(_FEWEST_WAYS, min(most_ways, len(values)) + 1))
    chosen = generator.choice(len(values), ways, replace=False)
    sizes = counts[chosen]
    queries = max(1, min(_MOST_QUERIES, int(sizes.min()) // 2))
    shots = _shots(sizes, queries, max(most_support, ways), generator)
    support, query = [], []
    for value, count in zip(values[chosen], shots, strict=True):
        order = generator.permutation(np.flatnonzero(labels == value))
        support.append(order[:count])
        query.append(order[count : count + queries])
    classes = np.arange(ways)
    return Episode(
        np.concatenate(support),
        np.repeat(classes, [len(own) for own in support]),
        np.concatenate(query),
        np.repeat(classes, [len(own) for own in query]),
    )


def _shots(
    sizes: NDArray[np.int64], queries: int, most_support: int, generator: np.random.Generator
) -> list[int]:
    share = 1.0 - generator.random()
    wanted = np.ceil(share * np.minimum(_COUNTED, sizes - queries)).sum()
    total = min(most_support, int(wanted))
    weights = sizes * np.exp(generator.uniform(np.log(0.5), np.log(2.0), len(sizes)))
    weights = weights / weights.sum()
    spare = max(total - len(sizes), 0)
    return [
        min(1 + int(weight * spare), int(size) - queries)
        for weight, size in zip(weights, sizes, strict=True)
    ]


class PseudoQueries:
    """Batches for adaptation by prototypes: the support set, followed by a random change of it.

    Each batch is ``(inputs, classes)`` with twice as many inputs as classes, as for `prototype_loss`: the first
    half gives the prototypes, the second half the queries (Hu et al., CVPR 2022).

    Parameters
    ----------
    support : Tensor, shape (n, channels, height, width)
        Support images.
    classes : Tensor of int, shape (n,)
        Their classes.
    iterations : int
        Number of batches per pass.
    seed : int
        Seed of the changes; each pass continues the random sequence of the previous one.
    """

    def __init__(self, support: Tensor, classes: Tensor, iterations: int, seed: int = 0) -> None:
        self._support, self._classes = support, classes
        self._iterations = iterations
        self._generator = torch.Generator().manual_seed(seed)
        self.dataset_size = len(support)

    def __len__(self) -> int:
        return self._iterations

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(self._iterations):
            queries = augmented(self._support, self._generator)
            yield torch.cat([self._support, queries]), self._classes


def augmented(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return images with random brightness, saturation and contrast, shifted by up to an eighth.

    The amounts are drawn for each image; one batch in ten is unchanged (Zhao et al., NeurIPS 2020, as used in
    few-shot adaptation).
    """
    if float(torch.rand((), generator=generator)) > _CHANCE:
        return images

    def amounts(low: float, high: float) -> Tensor:
        drawn = torch.rand(len(images), 1, 1, 1, generator=generator)
        return drawn * (high - low) + low

    changed = images + amounts(-0.5, 0.5)
    mean = changed.mean(1, keepdim=True)
    changed = (changed - mean) * amounts(0.0, 2.0) + mean
    mean = changed.mean((1, 2, 3), keepdim=True)
    changed = (changed - mean) * amounts(0.5, 1.5) + mean
    return _shifted(changed, generator)


def _shifted(images: Tensor, generator: torch.Generator) -> Tensor:
    reach = max(images.shape[-1] // 8, 1)
    shifts = torch.randint(-reach, reach + 1, (len(images), 2), generator=generator)
    padded = torch.nn.functional.pad(images, (reach, reach, reach, reach))
    height, width = images.shape[-2:]
    return torch.stack(
        [
            image[:, reach + down : reach + down + height, reach + right : reach + right + width]
            for image, (down, right) in zip(padded, shifts.tolist(), strict=True)
        ]
    )
