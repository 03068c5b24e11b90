"""Batches of arrays that are already in memory, without the cost of a DataLoader."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from fl_elastic.errors import DatasetError
from fl_elastic_simulations.data.resized import ResizedImages


class Batches:
    """A re-iterable of ``(inputs, targets)`` batches, reshuffled each time it is iterated.

    The order of the n-th iteration depends only on ``seed`` and n; no global random state is read or changed. A
    last batch of a single example would break batch normalisation (no variance of one value), so it is merged into
    the batch before, which then has ``batch_size + 1`` examples. It stays separate only if there is no batch before
    it, or if the batch size is 1.

    Parameters
    ----------
    x, y : array or tensor
        Inputs and as many targets. Arrays are shared, not copied; `ResizedImages` are resized batch by batch.
    batch_size : int
        Examples per batch.
    seed : int
        Determines the order of every iteration.
    steps : int, optional
        Number of batches per iteration, whatever the number of examples; several orders may follow one another.
    shuffle : bool
        ``False`` keeps the order of the arrays, for evaluation.

    Raises
    ------
    DatasetError
        If there is no example, the numbers of inputs and targets differ, or the batch size is
        below 1.

    Examples
    --------
    >>> import numpy as np
    >>> batches = Batches(np.zeros((5, 2), np.float32), np.arange(5), 2, seed=0)
    >>> [len(targets) for _, targets in batches]
    [2, 3]
    >>> len(batches), batches.dataset_size
    (2, 5)
    """

    def __init__(
        self,
        x: npt.NDArray[np.generic] | torch.Tensor | ResizedImages,
        y: npt.NDArray[np.generic] | torch.Tensor,
        batch_size: int,
        *,
        seed: int,
        steps: int | None = None,
        shuffle: bool = True,
    ) -> None:
        if len(x) != len(y):
            raise DatasetError(f"{len(x)} inputs do not fit {len(y)} targets: give one for each")
        if len(x) == 0:
            raise DatasetError("there is no example to make batches of: give at least one")
        if batch_size < 1:
            raise DatasetError(f"batch size {batch_size} is below 1")
        self._x = x if isinstance(x, ResizedImages) else torch.as_tensor(x)
        self._y = torch.as_tensor(y)
        self._seed = seed
        self._shuffle = shuffle
        self._bounds = _bounds(len(x), batch_size)
        self._steps = len(self._bounds) if steps is None else steps
        self._iterations = 0

    @property
    def dataset_size(self) -> int:
        """Number of examples in the batches."""
        return len(self._x)

    def __len__(self) -> int:
        """Return the number of batches of one iteration."""
        return self._steps

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Start the next iteration, in a new order."""
        # Counted here, not at the first batch, so that two iterators in use at once differ.
        iteration = self._iterations
        self._iterations += 1
        return self._batches(iteration)

    def _batches(self, iteration: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if not self._shuffle:
            for start, stop in self._bounds:
                yield torch.as_tensor(self._x[start:stop]), self._y[start:stop]
            return
        rng = np.random.default_rng([self._seed, iteration])
        for step in range(self._steps):
            place = step % len(self._bounds)
            if place == 0:
                order = torch.from_numpy(rng.permutation(len(self._x)))
            start, stop = self._bounds[place]
            chosen = order[start:stop]
            yield torch.as_tensor(self._x[chosen]), self._y[chosen]


def _bounds(examples: int, batch_size: int) -> list[tuple[int, int]]:
    starts = list(range(0, examples, batch_size))
    trailing = examples - starts[-1]
    if len(starts) > 1 and trailing == 1 < batch_size:
        del starts[-1]
    return list(zip(starts, [*starts[1:], examples], strict=True))
