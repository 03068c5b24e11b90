"""The bytes on the wire are those that servers and devices of other releases read and write."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from fl_elastic.update import Manifest, PartialUpdate, encode
from fl_elastic.update.manifest import Role

MANIFEST = Manifest(
    ("conv", "embedding", "norm.running_mean", "bias"), ((4, 3, 3, 3), (40, 8), (4,), ()),
    ("float32",) * 4, (Role.PARAMETER, Role.PARAMETER, Role.STATISTIC, Role.PARAMETER),
)  # fmt: skip


def update() -> PartialUpdate:
    """A tensor trained in part, one with untouched rows, a statistic, and a number."""
    # None is as large as another: which of two equal ones a sparse codec keeps is numpy's choice.
    numbers = (1 + np.arange(400) * 37 % 401).astype(np.float32) / 512
    numbers[::3] *= -1
    conv = numbers[:108].reshape(4, 3, 3, 3).copy()
    trained = np.array([True, False, True, False])
    conv[~trained] = 0
    embedding = numbers[:320].reshape(40, 8).copy()
    embedding[5:30] = 0
    return PartialUpdate(
        {"conv": conv, "embedding": embedding, "norm.running_mean": numbers[:4], "bias": numbers[7]},
        {"conv": 3, "embedding": 5, "norm.running_mean": 5, "bias": 5}, 17, base_version=2,
        parts={"conv": (trained, None, None, None)},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("codec", "length", "digest"),
    [
        ("fp32", 934, "d8bb8408ad618361"),
        ("fp16", 576, "766643de34e14b63"),
        ("bf16", 576, "ffde551ab4255aff"),
        ("int8", 433, "e073347e47cc53e7"),
        ("topk", 330, "d1ac2a6abe68b733"),
    ],
)
def test_bytes_of_a_release_stay(codec: str, length: int, digest: str) -> None:
    data = encode(update(), MANIFEST, codec)
    assert (len(data), hashlib.sha256(data).hexdigest()[:16]) == (length, digest)
