"""Features come back as they went in, within the bound, and only for the prefix they belong to."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fl_elastic.errors import BudgetError
from fl_elastic.training.feature_cache import FeatureCache, fingerprint
from fl_elastic.training.feature_codec import PRECISIONS, FeatureCodec

SHAPES = st.sampled_from([(5,), (3, 4), (4, 3, 3), (2, 5, 7)])


@given(shape=SHAPES, seed=st.integers(0, 1000), scale=st.sampled_from([1e-3, 1.0, 300.0]))
@pytest.mark.parametrize("precision", PRECISIONS)
def test_features_come_back_to_the_precision(
    precision: str, shape: tuple[int, ...], seed: int, scale: float
) -> None:
    features = torch.randn(6, *shape, generator=torch.Generator().manual_seed(seed)) * scale
    codec = FeatureCodec(precision, shape)
    rows = codec.encode(features)
    assert rows.shape == (6, codec.row_bytes) and rows.dtype == torch.uint8
    back = codec.decode(rows)
    if precision == "fp32":
        assert torch.equal(back, features)
    elif precision == "fp16":
        torch.testing.assert_close(back, features.half().float())
    else:
        parts = features.reshape(6, codec.scales, -1)
        spread = (parts.amax(2) - parts.amin(2)).repeat_interleave(parts.shape[2], 1)
        error = (back - features).reshape(6, -1).abs()
        assert bool((error <= spread / 255 * 0.51 + 1e-6).all())


def test_values_beyond_the_range_saturate_and_constants_stay() -> None:
    codec = FeatureCodec("fp16", (2,))
    assert codec.decode(codec.encode(torch.tensor([[1e6, -1e6]]))).tolist() == [[65504.0, -65504.0]]
    codec = FeatureCodec("int8", (3, 4, 4))
    constant = torch.full((2, 3, 4, 4), 7.25)
    torch.testing.assert_close(codec.decode(codec.encode(constant)), constant)


def test_an_unknown_precision_is_named() -> None:
    with pytest.raises(BudgetError, match="'fp8' is unknown, use fp32, fp16, int8"):
        FeatureCodec("fp8", (1,))


@pytest.mark.parametrize("on_disk", [False, True])
def test_what_is_stored_is_found_until_the_bound_is_reached(tmp_path: Path, on_disk: bool) -> None:
    path = tmp_path / "deep" / "features.bin" if on_disk else None
    cache = FeatureCache(10 * 4 * 4, "fp32", path)
    assert cache.prepare(b"a", (4,), examples=100) == 10
    features = torch.randn(12, 4)
    ids = [(index, 0) for index in range(12)]
    cache.store(ids[:7], features[:7])
    cache.store(ids[3:], features[3:])
    assert len(cache) == 10 and cache.used_bytes == 160 <= cache.limit_bytes
    rows = cache.rows(ids)
    assert rows[10:] == [None, None]
    assert torch.equal(cache.read([row for row in rows if row is not None]), features[:10])
    if path is not None:
        assert path.stat().st_size == 160
    cache.close()
    assert path is None or not path.exists()


def test_another_prefix_or_shape_starts_afresh() -> None:
    cache = FeatureCache(1000, "fp32")
    cache.prepare(b"a", (4,), examples=5)
    cache.store([(1, 1)], torch.ones(1, 4))
    cache.prepare(b"a", (4,), examples=5)
    assert cache.rows([(1, 1)]) == [0]
    cache.prepare(b"b", (4,), examples=5)
    assert cache.rows([(1, 1)]) == [None]
    cache.store([(1, 1)], torch.ones(1, 4))
    cache.prepare(b"b", (2, 2), examples=5)
    assert cache.rows([(1, 1)]) == [None]


def test_a_bound_below_one_example_is_refused_with_what_would_do() -> None:
    with pytest.raises(
        BudgetError, match="does not hold one example of 400 bytes: allow at least 4000"
    ):
        FeatureCache(399, "fp32").prepare(b"a", (100,), examples=10)
    with pytest.raises(BudgetError, match="0 bytes holds nothing"):
        FeatureCache(0)


def test_a_full_disk_is_refused_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    cache = FeatureCache(1000, "fp32", tmp_path / "features.bin")
    with pytest.raises(BudgetError, match="No space left on device; free some space"):
        cache.prepare(b"a", (4,), examples=5)
    assert list(tmp_path.iterdir()) == []


def test_a_really_full_disk_is_refused(tmp_path: Path) -> None:
    # More than any disk has: the file system itself says no.
    cache = FeatureCache(1 << 60, "fp32", tmp_path / "features.bin")
    with pytest.raises(BudgetError, match="cannot be made at"):
        cache.prepare(b"a", (1 << 20,), examples=1 << 36)
    assert list(tmp_path.iterdir()) == []


def test_a_fingerprint_sees_weights_buffers_and_place() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
    first = fingerprint([model], "cut")
    assert fingerprint([model], "cut") == first != fingerprint([model], "other")
    model[1].running_mean.add_(1e-6)  # type: ignore[union-attr, operator]
    second = fingerprint([model], "cut")
    assert second != first
    model[0].weight.data[0] += 1e-6
    assert fingerprint([model], "cut") not in (first, second)
