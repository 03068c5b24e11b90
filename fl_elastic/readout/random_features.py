"""Fixed random features of inputs, for data for which there is no pretrained model.

They are equal on every device, because their weights are drawn by numpy from a fixed seed, and these are not part
of a model's state.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import conv1d, conv2d

from fl_elastic.errors import PlanError
from fl_elastic.readout.poolings import POOLINGS, mean_over_grid

_SEED = 0
_FILTER, _STRIDE, _CELLS = 5, 2, 4
_LENGTH = 9
_Floats = NDArray[np.float64]


@POOLINGS.register("random")
class RandomFeatures(nn.Module):
    """Random features of a row, a sequence or an image.

    A row is passed through a random hidden layer. A sequence is passed through random dilated convolutions, each of
    which gives its largest value and the share of values above zero (ROCKET, Dempster et al., 2020). An image is
    passed through random filters, whose rectified outputs are averaged over a grid of 4 x 4 (Coates et al., 2011).

    Parameters
    ----------
    shape : tuple of int
        (D,), (C, L) or (C, H, W).
    size : int
        Number of features, rounded down to a multiple of 2 for sequences and of 16 for images.

    Examples
    --------
    >>> RandomFeatures((3, 64), 100)(torch.zeros(5, 3, 64)).shape
    torch.Size([5, 100])
    """

    _bias: Tensor

    def __init__(self, shape: tuple[int, ...], size: int) -> None:
        super().__init__()
        most = {1: 1, 2: 2, 3: _CELLS**2}.get(len(shape), 0)
        if not most or size < most:
            raise PlanError(
                f"random features need (D,), (C, L) or (C, H, W) and a size of at least {most or 1}, "
                f"got {shape} and {size}"
            )
        if len(shape) == 3 and min(shape[1:]) < 2 * _CELLS:
            raise PlanError(f"random features of images need sides of {2 * _CELLS}, got {shape}")
        rng = np.random.default_rng([_SEED, *shape, size])
        self._dilations: tuple[int, ...] = ()
        if len(shape) == 1:
            weights = [rng.normal(size=(size, *shape)) / math.sqrt(shape[0])]
            biases = rng.uniform(-1, 1, size)
        elif len(shape) == 2:
            weights, biases = self._dilated(rng, shape, size // 2)
        else:
            weights = [
                _without_mean(rng.normal(size=(size // _CELLS**2, shape[0], _FILTER, _FILTER)))
            ]
            biases = np.zeros(size // _CELLS**2)
        for number, weight in enumerate(weights):
            self.register_buffer(f"_weight{number}", _float(weight), persistent=False)
        self.register_buffer("_bias", _float(biases), persistent=False)
        self._kinds = len(weights)

    def forward(self, given: Tensor) -> Tensor:
        """Return (N, D)."""
        weights = [getattr(self, f"_weight{number}") for number in range(self._kinds)]
        if given.dim() == 2:
            return torch.relu(nn.functional.linear(given, weights[0], self._bias))
        if given.dim() == 4:
            found = conv2d(given, weights[0], stride=_STRIDE, padding=_FILTER // 2)
            return mean_over_grid(torch.relu(found), _CELLS)
        ends = np.cumsum([len(each) for each in weights])[:-1].tolist()
        rows = []
        for weight, bias, dilation in zip(
            weights, self._bias.tensor_split(ends), self._dilations, strict=True
        ):
            found = conv1d(given, weight, bias, padding=_LENGTH // 2 * dilation, dilation=dilation)
            rows += [found.amax(dim=2), (found > 0).to(found.dtype).mean(dim=2)]
        return torch.cat(rows, dim=1)

    def _dilated(
        self, rng: np.random.Generator, shape: tuple[int, ...], count: int
    ) -> tuple[list[_Floats], _Floats]:
        """Draw kernels that each read some of the channels, and set the dilations of the kernels."""
        channels, length = shape
        most = max(int(math.log2(max((length - 1) / (_LENGTH - 1), 1))), 0)
        drawn = np.sort(rng.integers(0, most + 1, count))
        weights = rng.normal(size=(count, channels, _LENGTH))
        weights -= weights.mean(axis=2, keepdims=True)
        reads = (
            rng.random((count, channels)).argsort(axis=1)
            < np.exp2(rng.uniform(0, math.log2(channels + 1), count))
            .astype(int)
            .clip(1, channels)[:, None]
        )
        weights *= reads[:, :, None]
        found = [2**each for each in range(most + 1) if (drawn == each).any()]
        self._dilations = tuple(found)
        return [weights[drawn == round(math.log2(each))] for each in found], rng.uniform(
            -1, 1, count
        )


def _without_mean(filters: _Floats) -> _Floats:
    """Return the filters with zero mean, so that uniform brightness gives zero, and with norm one."""
    filters = filters - filters.mean(axis=(2, 3), keepdims=True)
    scaled: _Floats = filters / np.sqrt((filters**2).sum(axis=(1, 2, 3), keepdims=True))
    return scaled


def _float(values: _Floats) -> Tensor:
    return torch.from_numpy(values.astype(np.float32))
