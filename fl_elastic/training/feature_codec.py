"""Store features with 32, 16 or 8 bits per number; and a digest of the model that computes them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fl_elastic.errors import SettingError
from fl_elastic.groups.forward import tensor_bytes

PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "int8": torch.uint8}
# Largest error, as a share of an example's greatest value. A larger one means a value beyond the range of fp16.
_TOLERANCE = {"fp32": 1e-6, "fp16": 1e-3, "int8": 5e-3}
# Largest squared error, as a share of the variance between examples: if features differ little beside a large
# common part, rounding would erase the differences.
_MOST_LOST = 1e-2
# Each scale takes eight bytes: with fewer values per scale, rows would be hardly smaller than in fp16.
_FEWEST_POSITIONS = 64
_DIGEST = 16


@dataclass(frozen=True)
class FeatureCodec:
    """How features of one shape are stored, as one row of bytes per example.

    Parameters
    ----------
    precision : {"fp32", "fp16", "int8"}
        fp16 saturates beyond 65504. int8 scales each channel of each example from its least to its greatest value,
        or the whole example if a channel has fewer than 64 positions; the error is at most half a 255th of that
        range.
    shape : tuple of int
        Shape of one example's features.
    """

    precision: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise SettingError(
                f"feature precision {self.precision!r} is unknown, use {', '.join(PRECISIONS)}"
            )

    @property
    def tolerance(self) -> float:
        """Largest error of a stored value, as a share of its example's greatest value."""
        return _TOLERANCE[self.precision]

    @property
    def most(self) -> float:
        """Largest absolute value that can be stored, exactly or to within `tolerance`."""
        if self.precision == "fp16":
            return torch.finfo(torch.float16).max
        # The range between a least and a greatest value has to be a number, too.
        return torch.finfo(torch.float32).max / (2 if self.precision == "int8" else 1)

    @property
    def scales(self) -> int:
        """Number of pairs (least value, scale) per example; 0 unless the precision is int8."""
        if self.precision != "int8":
            return 0
        positions = math.prod(self.shape[1:])
        return self.shape[0] if len(self.shape) > 1 and positions >= _FEWEST_POSITIONS else 1

    @property
    def _positions(self) -> int:
        return math.prod(self.shape) // max(self.scales, 1)

    @property
    def row_bytes(self) -> int:
        """Bytes per example."""
        return math.prod(self.shape) * PRECISIONS[self.precision].itemsize + 8 * self.scales

    def encode(self, features: Tensor) -> Tensor:
        """Return rows of bytes, shape (B, row_bytes), for features of shape (B, *shape)."""
        # Sizes are explicit, because -1 cannot be inferred for a batch of no examples.
        flat = features.detach().reshape(len(features), math.prod(self.shape)).cpu().float()
        if self.precision == "fp32":
            return _bytes_of(flat)
        if self.precision == "fp16":
            limit = torch.finfo(torch.float16).max
            return _bytes_of(flat.clamp(-limit, limit).half())
        parts = flat.reshape(len(flat), self.scales, self._positions)
        least = parts.amin(2, keepdim=True)
        scale = ((parts.amax(2, keepdim=True) - least) / 255).clamp(min=1e-12)
        codes = ((parts - least) / scale).round().clamp(0, 255).to(torch.uint8)
        header = torch.cat([least, scale], 2).flatten(1)
        return torch.cat([_bytes_of(header), codes.flatten(1)], 1)

    def decode(self, rows: Tensor) -> Tensor:
        """Return the features, shape (B, *shape), of rows that `encode` made."""
        count = len(rows)
        if self.precision != "int8":
            values = rows.reshape(-1).view(PRECISIONS[self.precision]).float()
            return values.reshape(count, *self.shape)
        header = rows[:, : 8 * self.scales].reshape(-1).view(torch.float32)
        least, scale = header.reshape(count, self.scales, 2, 1).unbind(2)
        codes = rows[:, 8 * self.scales :].reshape(count, self.scales, self._positions)
        return torch.addcmul(least, codes.float(), scale).reshape(count, *self.shape)

    def keeps(self, features: Tensor, rows: Tensor) -> Tensor:
        """Return which examples can be stored, shape (B,).

        Each value has to stay within `tolerance` (fp16 has a narrow range), and the error has to be small compared
        with the differences between the batch's examples.
        """
        flat = features.detach().reshape(len(features), math.prod(self.shape)).cpu().float()
        error = self.decode(rows).reshape(flat.shape) - flat
        whole = error.abs().amax(1) <= self.tolerance * flat.abs().amax(1)
        if len(flat) < 2:
            return whole
        apart = (flat - flat.mean(0)).square().sum(1).mean()
        return whole & ((error.square().sum(1) <= _MOST_LOST * apart) | (apart == 0))


def _bytes_of(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def fingerprint(
    modules: Sequence[nn.Module], place: str, others: Iterable[tuple[str, Tensor]] = ()
) -> bytes:
    """Return a digest of all that features depend on: tensors of ``modules``, other named ones, and the place."""
    digest = hashlib.blake2b(place.encode(), digest_size=_DIGEST)
    tensors = [each for module in modules for each in _tensors_of(module).items()]
    for name, tensor in (*tensors, *others):
        digest.update(name.encode())
        digest.update(tensor_bytes(tensor))
    return digest.digest()


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a module computes with, including buffers that are not saved."""
    saved = {
        name: tensor
        for name, tensor in module.state_dict(keep_vars=True).items()
        if isinstance(tensor, Tensor)
    }
    return saved | dict(module.named_buffers())
