"""Identify examples by their content."""

from __future__ import annotations

import hashlib
import math
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fl_elastic.errors import ModelError
from fl_elastic.groups.batch_rows import count_rows, entries
from fl_elastic.groups.forward import is_sparse

SampleId: TypeAlias = tuple[int, int]

_STEP = 0x2545F4914F6CDD1D


def sample_ids(inputs: Any) -> list[SampleId]:
    """Return an identifier for each prepared input: a 128-bit hash of its content, shape and dtype.

    In a dict, tuple or list every entry is hashed, with its name: tokens with another attention mask are another
    example, and so are tokens with another value of an entry that all examples share.

    An augmented example gets another identifier, so it is never confused with the original, and the few variants of
    a simple augmentation can all be stored. The hash is multilinear (Carter and Wegman, 1979) with fixed random
    multipliers, because a cryptographic digest of an image takes longer than a step of the head. The same image
    stored channels last gets another identifier.

    Parameters
    ----------
    inputs : Tensor, or a dict, tuple or list of them
        Shape (B, ...); a tensor of another length, a number, a text or None belongs to all examples.

    Raises
    ------
    ModelError
        If an entry is something else, or there is no tensor with a row per example.

    Examples
    --------
    >>> first, second, third = sample_ids(torch.tensor([[1.0, 2.0], [2.0, 1.0], [1.0, 2.0]]))
    >>> first == third, first == second
    (True, False)
    >>> tokens, mask = torch.ones(2, 3), torch.tensor([[1, 1, 1], [1, 1, 0]])
    >>> first, second = sample_ids({"tokens": tokens, "mask": mask})
    >>> first == second
    False
    """
    if isinstance(inputs, Tensor):
        hashes = _hashes(inputs, "")
    else:
        count = count_rows(inputs)
        hashes = [torch.zeros(count, dtype=torch.int64) for _ in range(2)]
        for path, entry in entries(inputs):
            own = _hashes_of(entry, path, count)
            # A polynomial in an odd number; high bits are mixed down, because multiplication only carries upwards.
            hashes = [
                before * _STEP + (each ^ (each >> 32))
                for before, each in zip(hashes, own, strict=True)
            ]
    return list(zip(*(each.tolist() for each in hashes), strict=True))


def _hashes_of(entry: Any, path: str, count: int) -> list[Tensor]:
    """Return two hashes per example for one entry of a batch."""
    if isinstance(entry, Tensor):
        if entry.dim() and len(entry) == count:
            return _hashes(entry, path)
        return [each.expand(count) for each in _hashes(entry.reshape(1, *entry.shape), path)]
    if entry is None or isinstance(entry, (bool, int, float, str)):
        return [torch.tensor(each).expand(count) for each in _kind(f"{path}={entry!r}")]
    raise ModelError(
        f"the inputs hold a {type(entry).__name__}{' at ' + path if path else ''}, so that examples cannot be told "
        "apart: give tensors, numbers or text"
    )


def _hashes(inputs: Tensor, path: str) -> list[Tensor]:
    """Return two hashes per row of a tensor."""
    if is_sparse(inputs):
        raise ModelError("a sparse tensor's examples cannot be told apart: give dense inputs")
    rows = inputs.detach().cpu()
    if rows.dim() == 4 and rows.is_contiguous(memory_format=torch.channels_last):
        rows = rows.permute(0, 2, 3, 1)
    flat = rows.reshape(len(rows), math.prod(rows.shape[1:]))
    # Columns or a part of a table may not be aligned to whole words, so they are copied.
    if not flat.is_contiguous() or flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone(memory_format=torch.contiguous_format)
    flat = flat.view(torch.uint8)
    if flat.shape[1] % 8 or not flat.shape[1]:
        flat = torch.nn.functional.pad(flat, (0, 8 - flat.shape[1] % 8))
    words = flat.view(torch.int64)
    # Multiplication only carries upwards, so without this high bits would not affect the low ones.
    words = words ^ (words >> 32)
    # The same numbers in another shape, or padded with zeros, are another example.
    kind = _kind(f"{path}{rows.dtype}{tuple(rows.shape[1:])}")
    return [
        (words * multipliers).sum(1) + start
        for multipliers, start in zip(_multipliers(words.shape[1]), kind, strict=True)
    ]


@cache
def _kind(text: str) -> tuple[int, int]:
    """Return two numbers that distinguish kinds of entries by name, dtype and shape."""
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    first, second = (int.from_bytes(digest[i : i + 8], "big", signed=True) for i in (0, 8))
    return first, second


@cache
def _multipliers(count: int) -> Tensor:
    """Return two rows of odd random numbers, the same in every process."""
    generator = torch.Generator().manual_seed(20_240_613)
    return torch.randint(-(1 << 62), 1 << 62, (2, count), generator=generator) * 2 + 1
