"""Tell examples apart by what is in them."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import TypeAlias

import torch
from torch import Tensor

__all__ = ["SampleId", "sample_ids"]

SampleId: TypeAlias = tuple[int, int]


def sample_ids(inputs: Tensor) -> list[SampleId]:
    """Return what identifies each prepared input: 128 bits of a hash of its content, shape and type.

    An example that augmentation has changed is another one, so stale features are never found, and an
    augmentation with few variants per example needs no further key. Multilinear hashing (Carter and Wegman,
    1979) with fixed random multipliers, because a cryptographic digest of an image takes longer than a step of
    the head. Content laid out channels last is another content.

    Parameters
    ----------
    inputs : Tensor
        Shape (B, ...).

    Examples
    --------
    >>> first, second, third = sample_ids(torch.tensor([[1.0, 2.0], [2.0, 1.0], [1.0, 2.0]]))
    >>> first == third, first == second
    (True, False)
    """
    rows = inputs.detach().cpu()
    if rows.dim() == 4 and rows.is_contiguous(memory_format=torch.channels_last):
        rows = rows.permute(0, 2, 3, 1)
    flat = rows.reshape(len(rows), -1).view(torch.uint8)
    if flat.shape[1] % 8:
        flat = torch.nn.functional.pad(flat, (0, 8 - flat.shape[1] % 8))
    words = flat.view(torch.int64)
    # Multiplication carries upwards only: without this, high bits would not reach the low ones.
    words = words ^ (words >> 32)
    # The same numbers in another shape, or padded with zeros, are another example.
    kind = _kind(str(rows.dtype), tuple(rows.shape[1:]))
    hashes = [
        ((words * multipliers).sum(1) + start).tolist()
        for multipliers, start in zip(_multipliers(words.shape[1]), kind, strict=True)
    ]
    return list(zip(*hashes, strict=True))


@cache
def _kind(dtype: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return two numbers that tell type and shape."""
    digest = hashlib.blake2b(f"{dtype}{shape}".encode(), digest_size=16).digest()
    first, second = (int.from_bytes(digest[i : i + 8], "big", signed=True) for i in (0, 8))
    return first, second


@cache
def _multipliers(count: int) -> Tensor:
    """Return two rows of odd random numbers, the same in every process."""
    generator = torch.Generator().manual_seed(20_240_613)
    return torch.randint(-(1 << 62), 1 << 62, (2, count), generator=generator) * 2 + 1
