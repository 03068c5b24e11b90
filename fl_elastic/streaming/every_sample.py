"""Every labelled sample of a stream once: for what is counted over all data instead of being trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_elastic.errors import StreamError
from fl_elastic.groups import Batch
from fl_elastic.streaming.replay_loader import Pool

__all__ = ["EverySample"]


class EverySample:
    """A loader of the stored samples, and of the new ones that are not stored as yet.

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
