"""Read each image and its mirror image: features are the means over the two.

It suits classes that do not depend on left and right.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fl_elastic.errors import PlanError
from fl_elastic.groups.batch_rows import map_rows

_IMAGES = 4


def with_mirror_images(inputs: Any) -> Any:
    """Return the inputs of a batch, followed by the same inputs with images mirrored left to right.

    Raises
    ------
    PlanError
        If there are no images, a tensor of shape (N, C, H, W).

    Examples
    --------
    >>> with_mirror_images(torch.tensor([[[[1.0, 2.0]]]])).tolist()
    [[[[1.0, 2.0]]], [[[2.0, 1.0]]]]
    """
    found = False

    def doubled(rows: Tensor) -> Tensor:
        nonlocal found
        if rows.dim() != _IMAGES:
            return torch.cat([rows, rows])
        found = True
        return torch.cat([rows, rows.flip(-1)])

    views = map_rows(doubled, inputs)
    if not found:
        raise PlanError(
            "mirrored: needs images, of shape (N, C, H, W), and the inputs hold none: leave mirrored: out"
        )
    return views


def mean_of_views(features: Tensor) -> Tensor:
    """Return the mean features of each image and its mirror image, shape (N, D), for features of shape (2 N, D)."""
    return features.reshape(2, -1, features.shape[1]).mean(dim=0)
