"""Read each image and its mirror image: features are the means over the two.

It suits classes that do not depend on left and right; the held-out error says whether it helps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fl_elastic.errors import PlanError
from fl_elastic.groups.examples import map_rows

_IMAGES, _HALF = 4, 0.5


def with_mirror_images(inputs: Any) -> Any:
    """Return the inputs of a batch followed by the same with images mirrored, left to right.

    Raises
    ------
    PlanError
        If there are no images, a tensor of shape (N, C, H, W).

    Examples
    --------
    >>> with_mirror_images(torch.tensor([[[[1.0, 2.0]]]])).tolist()
    [[[[1.0, 2.0]]], [[[2.0, 1.0]]]]
    """
    return _changed(
        inputs,
        lambda images: torch.cat([images, images.flip(-1)]),
        lambda rows: torch.cat([rows, rows]),
    )


def mirrored_at_random(inputs: Any) -> Any:
    """Return the inputs of a batch with about half of the images mirrored, drawn from torch's random state.

    Raises
    ------
    PlanError
        If there are no images, a tensor of shape (N, C, H, W).
    """

    def some(images: Tensor) -> Tensor:
        turned = torch.rand(images.shape[0], 1, 1, 1, device=images.device) < _HALF
        return torch.where(turned, images.flip(-1), images)

    return _changed(inputs, some, lambda rows: rows)


def _changed(
    inputs: Any, images: Callable[[Tensor], Tensor], others: Callable[[Tensor], Tensor]
) -> Any:
    found = False

    def changed(rows: Tensor) -> Tensor:
        nonlocal found
        if rows.dim() != _IMAGES:
            return others(rows)
        found = True
        return images(rows)

    given = map_rows(changed, inputs)
    if not found:
        raise PlanError(
            "mirrored: is for images, of shape (N, C, H, W), which the inputs do not hold: read without it"
        )
    return given


def mean_of_views(features: Tensor) -> Tensor:
    """Return the mean features of each image and its mirror image, shape (N, D), for features of shape (2 N, D)."""
    return features.reshape(2, -1, features.shape[1]).mean(dim=0)
