"""Images that are resized when they are read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class ResizedImages:
    """Images that are kept in their own size, and resized (bilinear) as they are indexed.

    A data set that is resized as a whole may not fit into memory: the 60,000 images of CIFAR-10 take 0.7 GB, but
    36 GB at 224 pixels.

    Parameters
    ----------
    images : array of float32, shape (N, C, H, W)
        The images.
    size : int
        Height and width in pixels after resizing.

    Examples
    --------
    >>> images = ResizedImages(np.ones((5, 3, 8, 8), np.float32), 16)
    >>> len(images), images.shape, images[[0, 4]].shape
    (5, (5, 3, 16, 16), (2, 3, 16, 16))
    """

    images: npt.NDArray[np.float32]
    size: int

    def __len__(self) -> int:
        return len(self.images)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of all images after resizing."""
        return (*self.images.shape[:2], self.size, self.size)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.images.ndim

    def __getitem__(self, rows: Any) -> npt.NDArray[np.float32]:
        """Return some images, resized; ``rows`` is a slice, or an array or tensor of indices."""
        # Imported here, since naming a dataset need not load torch.
        import torch
        from torch import nn

        images = torch.from_numpy(self.images)[rows]
        found = nn.functional.interpolate(
            images, (self.size, self.size), mode="bilinear", antialias=True
        )
        return np.asarray(found.numpy(), np.float32)

    def part(self, rows: npt.NDArray[np.int64]) -> ResizedImages:
        """Return some of the images, which are not resized yet."""
        return replace(self, images=self.images[rows])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Return all images, resized."""
        del copy
        return np.asarray(self[:], dtype)
