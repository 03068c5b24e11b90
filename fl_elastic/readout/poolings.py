"""Poolings, which turn the tensor at a place into a row of features for each example."""

from __future__ import annotations

import math
from typing import Protocol

from torch import Tensor, nn

from fl_elastic.errors import PlanError
from fl_elastic.readout.place import Place
from fl_elastic.registry import Registry


class Pooling(Protocol):
    """Makes the module that turns tensors of one shape into rows of features.

    A pooling is registered under a name without digits, because digits that follow it in a place's name are its
    size. `fl_elastic.testing.pooling_checks` test whether a pooling keeps this contract.
    """

    def __call__(self, shape: tuple[int, ...], size: int) -> nn.Module:
        """Return a module without trained weights that maps floats of shape (N, *shape) to (N, D).

        Equal arguments give equal modules on every device: anything random in it comes from a fixed seed. Raises
        PlanError if shape or size do not suit.
        """


POOLINGS: Registry[Pooling] = Registry(
    "pooling",
    group="fl_elastic.poolings",
    modules={"random": "fl_elastic.readout.random_features"},
)


def pooling_for(place: Place, given: Tensor) -> nn.Module:
    """Return the pooling module of a place, for tensors of the shape of ``given`` and any number of examples.

    Raises
    ------
    RegistryError
        If the place's pooling is not registered.
    PlanError
        If the shape does not suit the pooling.

    Examples
    --------
    >>> import torch
    >>> maps = torch.ones(5, 3, 8, 8)
    >>> pooling_for(Place.parse("features.6@grid2"), maps)(maps).shape
    torch.Size([5, 12])
    """
    pooling = POOLINGS.get(place.pooling)(tuple(given.shape[1:]), place.size)
    return pooling.to(device=given.device, dtype=given.dtype)


@POOLINGS.register("grid")
class GridPooling(nn.Module):
    """Mean over each cell of a grid, of channels-first maps in one to three dimensions.

    Parameters
    ----------
    shape : tuple of int
        (C, L), (C, H, W) or, of volumes and videos, (C, T, H, W); a plain row (D,) counts as a single cell.
    size : int
        Number of cells along each dimension, at least 1 and at most the shorter side.
    """

    def __init__(self, shape: tuple[int, ...], size: int) -> None:
        super().__init__()
        if len(shape) not in (1, 2, 3, 4):
            raise PlanError(
                f"grid pooling needs (C, L), (C, H, W) or (C, T, H, W), the place has {shape}"
            )
        if not 1 <= size <= min(shape[1:], default=1):
            raise PlanError(f"a grid of {size} does not fit a place of shape {shape}")
        self._size = size

    def forward(self, given: Tensor) -> Tensor:
        """Return (N, C * cells)."""
        return mean_over_grid(given, self._size)


@POOLINGS.register("tokens")
class TokenPooling(nn.Module):
    """Mean over each cell of the grid that tokens form; a class token before them is left out.

    Parameters
    ----------
    shape : tuple of int
        (T, C), or (H, W, C) as in Swin. This T decides whether tokens form a square; batches of texts may later
        have another T.
    size : int
        Number of cells along each dimension.
    """

    def __init__(self, shape: tuple[int, ...], size: int) -> None:
        super().__init__()
        if len(shape) not in (2, 3):
            raise PlanError(f"token pooling needs (T, C) or (H, W, C), the place has {shape}")
        sides = shape[:-1] if len(shape) == 3 else (_side(shape[0]) or (shape[0],))[:1]
        if not 1 <= size <= min(sides):
            raise PlanError(f"a grid of {size} does not fit tokens of shape {shape}")
        self._size, self._square = size, len(shape) == 2 and _side(shape[0]) is not None

    def forward(self, given: Tensor) -> Tensor:
        """Return (N, C * cells)."""
        if not self._square:
            return mean_over_grid(given.movedim(-1, 1), self._size)
        side = _side(given.shape[1])
        if side is None:
            # As many cells as a square grid has, one after the other.
            return mean_over_grid(given.movedim(-1, 1), self._size**2)
        given = given[:, side[1] :]
        if self._size > 1:
            given = given.reshape(given.shape[0], side[0], side[0], given.shape[2])
        return mean_over_grid(given.movedim(-1, 1), self._size)


@POOLINGS.register("first")
class FirstToken(nn.Module):
    """The first token, such as a class token.

    Parameters
    ----------
    shape : tuple of int
        (T, C).
    size : int
        Must be 0: this pooling has no size.
    """

    def __init__(self, shape: tuple[int, ...], size: int) -> None:
        super().__init__()
        if len(shape) != 2 or size:
            raise PlanError(f"the first token needs (T, C) and no size, the place has {shape}")

    def forward(self, given: Tensor) -> Tensor:
        """Return (N, C)."""
        return given[:, 0]


@POOLINGS.register("flat")
class Flat(nn.Module):
    """All numbers of the tensor, flattened.

    Parameters
    ----------
    shape : tuple of int
        Any shape with at least one dimension.
    size : int
        Must be 0: this pooling has no size.
    """

    def __init__(self, shape: tuple[int, ...], size: int) -> None:
        super().__init__()
        if size or not shape:
            raise PlanError(
                f"flat needs numbers of each example and no size, got {shape} and {size}"
            )

    def forward(self, given: Tensor) -> Tensor:
        """Return (N, D)."""
        return given.flatten(1)


def mean_over_grid(given: Tensor, size: int) -> Tensor:
    """Return the means over the cells of a grid that spans all dimensions after the second."""
    if given.dim() == 2:
        return given
    if size == 1:
        return given.flatten(2).mean(dim=2)
    pools = {
        3: nn.functional.adaptive_avg_pool1d,
        4: nn.functional.adaptive_avg_pool2d,
        5: nn.functional.adaptive_avg_pool3d,
    }
    return pools[given.dim()](given, size).flatten(1)


def _side(tokens: int) -> tuple[int, int] | None:
    """Return the side of a square of tokens, and the number of tokens before it; None if they form no square.

    >>> _side(49), _side(197), _side(30)
    ((7, 0), (14, 1), None)
    """
    for before in (0, 1):
        side = math.isqrt(tokens - before)
        if side > 1 and side * side == tokens - before:
            return side, before
    return None
