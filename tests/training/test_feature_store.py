"""Features come back as they went in, within the bound, and only for the prefix they belong to."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fl_elastic.errors import BudgetError, SettingError
from fl_elastic.state.rows import Rows, page_for, room_of
from fl_elastic.training.feature_codec import PRECISIONS, FeatureCodec, fingerprint
from fl_elastic.training.feature_store import FeatureStore

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


@pytest.mark.parametrize(
    ("precision", "common", "kept"),
    [
        ("fp16", 0.0, True), ("fp16", 30.0, True), ("fp16", 1e3, False), ("fp16", 1e4, False),
        ("int8", 0.0, True), ("int8", 1e4, True), ("fp32", 1e4, True),
    ],
)  # fmt: skip
def test_features_that_hardly_differ_beside_a_large_part_in_common_are_kept_if_they_still_differ(
    precision: str, common: float, kept: bool
) -> None:
    """As behind a layer that reads pressures in pascal: at 10,000 numbers of fp16 are 8 apart."""
    features = common + 0.5 * torch.randn(16, 12, generator=torch.Generator().manual_seed(0))
    store = FeatureStore(1 << 20, precision)
    store.prepare(b"prefix", (12,), 16)
    store.store([(i, i) for i in range(16)], features)
    assert (len(store), store.unfit) == ((16, 0) if kept else (0, 16))
    # Of equal examples, and of one alone, nothing can be lost.
    alike = torch.full((2, 12), 1000.1)
    codec = FeatureCodec(precision, (12,))
    assert codec.keeps(alike, codec.encode(alike)).tolist() == [True, True]
    assert codec.keeps(features[:1], codec.encode(features[:1])).tolist() == [True]


@pytest.mark.parametrize("shape", [(), (100,), (3, 8, 8)])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_no_examples_come_back_as_none(precision: str, shape: tuple[int, ...]) -> None:
    codec, features = FeatureCodec(precision, shape), torch.zeros(0, *shape)
    rows = codec.encode(features)
    assert rows.shape == (0, codec.row_bytes) and rows.dtype == torch.uint8
    assert torch.equal(codec.decode(rows), features) and codec.keeps(features, rows).shape == (0,)


def test_an_unknown_precision_is_named() -> None:
    with pytest.raises(SettingError, match="'fp8' is unknown, use fp32, fp16, int8"):
        FeatureCodec("fp8", (1,))


@pytest.mark.parametrize("on_disk", [False, True])
def test_what_is_stored_is_found_until_the_bound_is_reached(tmp_path: Path, on_disk: bool) -> None:
    path = tmp_path / "deep" / "features.db" if on_disk else None
    # Each row says whose it is, and proves that it is whole.
    stride = room_of(17, page_for(17))
    cache = FeatureStore(10 * stride, "fp32", path)
    assert cache.prepare(b"a", (4,), examples=100) == 10
    features = torch.randn(12, 4)
    ids = [(index, 0) for index in range(12)]
    cache.store(ids[:7], features[:7])
    cache.store(ids[3:], features[3:])
    assert len(cache) == 10 and cache.used_bytes == 10 * stride <= cache.limit_bytes
    places, found = cache.read(ids)
    assert places == list(range(10)) and torch.equal(found, features[:10])
    assert cache.read(ids[10:])[0] == []
    if path is not None:
        assert path.stat().st_size <= 10 * stride + 5 * 2**14
    cache.close()
    assert path is None or path.exists()


def test_another_prefix_or_shape_starts_afresh() -> None:
    cache = FeatureStore(1000, "fp32")
    cache.prepare(b"a", (4,), examples=5)
    cache.store([(1, 1)], torch.ones(1, 4))
    cache.prepare(b"a", (4,), examples=5)
    assert cache.read([(1, 1)])[0] == [0]
    cache.prepare(b"b", (4,), examples=5)
    assert cache.read([(1, 1)])[0] == []
    cache.store([(1, 1)], torch.ones(1, 4))
    cache.prepare(b"b", (2, 2), examples=5)
    assert cache.read([(1, 1)])[0] == []


def test_a_bound_below_one_example_is_refused_with_what_would_do() -> None:
    with pytest.raises(
        BudgetError, match="does not hold one example of 456 bytes: allow at least 4560"
    ):
        FeatureStore(399, "fp32").prepare(b"a", (100,), examples=10)
    with pytest.raises(BudgetError, match="0 bytes holds nothing"):
        FeatureStore(0)


def test_a_full_disk_is_refused_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    cache = FeatureStore(1000, "fp32", tmp_path / "features.db")
    with pytest.raises(BudgetError, match="No space left on device; free some space"):
        cache.prepare(b"a", (4,), examples=5)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_meanwhile_ends_the_taking_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "features.db"
    store = filled(path, 20)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Rows, "add", full)
        store.prepare(b"prefix", (64,), 40)
        for one in range(15, 31):
            store.store([(one, one)], features_of(one))
    assert len(store) == 20 and caplog.text.count("keeps the features of 20") == 1
    store.close()
    assert check_all(path, 40) == 20
    store = FeatureStore(1 << 20, "fp32", path)
    store.prepare(b"prefix", (64,), 40)
    monkeypatch.setattr(Rows, "remove", full)
    assert store.keep_only([(1, 1)]) == 20 and not path.exists()


def test_a_really_full_disk_is_refused(tmp_path: Path) -> None:
    # More than any disk has: the file system itself says no.
    cache = FeatureStore(1 << 60, "fp32", tmp_path / "features.db")
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


def features_of(one: int) -> torch.Tensor:
    """What belongs to a sample, so that anything else is seen."""
    return torch.randn(1, 64, generator=torch.Generator().manual_seed(one))


def check_all(path: Path, count: int) -> int:
    """Open the file anew; whatever is found is what was stored. Return how many are."""
    store = FeatureStore(1 << 20, "fp32", path)
    store.prepare(b"prefix", (64,), count)
    places, found = store.read([(one, one) for one in range(1, count + 1)])
    for place, row in zip(places, found, strict=True):
        assert torch.equal(row, features_of(place + 1)[0])
    store.close()
    return len(places)


def filled(path: Path, count: int) -> FeatureStore:
    store = FeatureStore(1 << 20, "fp32", path)
    store.prepare(b"prefix", (64,), count)
    for one in range(1, count + 1):
        store.store([(one, one)], features_of(one))
    return store


def test_the_next_process_finds_what_this_one_stored(tmp_path: Path) -> None:
    path = tmp_path / "features.db"
    filled(path, 20).close()
    assert check_all(path, 20) == 20
    # More samples than before find room, and the old ones stay.
    assert check_all(path, 50) == 20


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_what_was_stored_in_another_type_is_not_given_out_in_this_one(precision: str) -> None:
    store = FeatureStore(1 << 20, precision)
    store.prepare(b"prefix", (4,), 10)
    large = torch.tensor([[1e5, -2e5, 3e5, 0.0]])
    store.store([(1, 1)], large)
    store.store([(2, 2)], torch.ones(1, 4, dtype=torch.float16))
    places, features = store.read([(1, 1), (2, 2)])
    assert places == [1] and features.dtype == torch.float16
    store.store([(1, 1)], large)
    assert store.read([(1, 1), (2, 2)])[0] == [0]
    torch.testing.assert_close(store.read([(1, 1)])[1], large, rtol=0.01, atol=2e3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_features_come_back_in_their_type(tmp_path: Path, dtype: torch.dtype) -> None:
    for _ in range(2):
        store = FeatureStore(1 << 20, "fp32", tmp_path / "features.db")
        store.prepare(b"prefix", (4,), 2)
        store.store([(1, 1)], torch.ones(1, 4, dtype=dtype))
        assert store.read([(1, 1)])[1].dtype == dtype
        store.close()


def test_changed_bytes_are_never_taken_for_features(tmp_path: Path) -> None:
    path, draw = tmp_path / "features.db", random.Random(0)
    for _ in range(60):
        filled(path, 8).close()
        data = bytearray(path.read_bytes())
        for _ in range(draw.choice([1, 3, 200])):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data[: draw.randrange(len(data))] if draw.random() < 0.3 else data)
        check_all(path, 8)
        path.unlink()


def test_a_damaged_row_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "features.bin"
    filled(path, 5).close()
    with closing(sqlite3.connect(path)) as file:
        file.execute("UPDATE rows SET data = zeroblob(257) WHERE place = 3")
        file.commit()
    assert check_all(path, 5) == 4
    filled(path, 5).close()
    assert check_all(path, 5) == 5


def write_for_ever(path: Path, pipe: int) -> None:
    """Fill a file and take half of it away again, over and over, once somebody has been told."""
    os.write(pipe, b"ready")
    while True:
        store = filled(path, 200)
        store.keep_only([(one, one) for one in range(1, 200, 2)])
        store.close()


def test_a_killed_writer_leaves_whole_features_only(tmp_path: Path) -> None:
    """Eight of them, as a stream's store and learner are killed."""
    path, found, draw = tmp_path / "features.db", 0, random.Random(1)
    for _ in range(8):
        reading, writing = os.pipe()
        writer = os.fork()
        if writer == 0:
            try:
                write_for_ever(path, writing)
            finally:
                os._exit(1)
        os.close(writing)
        try:
            assert os.read(reading, 5) == b"ready"
            time.sleep(draw.uniform(0.0, 0.05))
        finally:
            os.close(reading)
            os.kill(writer, signal.SIGKILL)
            os.waitpid(writer, 0)
        found += check_all(path, 200)
    assert found > 0


def test_a_file_in_use_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "features.db"
    first = filled(path, 5)
    second = FeatureStore(1 << 20, "fp32", path)
    with pytest.raises(BudgetError, match="in use by another process"):
        second.prepare(b"other", (64,), 5)
    first.close()
    assert check_all(path, 5) == 5


def test_what_is_wiped_is_gone_from_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "features.db"
    store = filled(path, 6)
    assert store.keep_only([(one, one) for one in (2, 4)]) == 4
    store.close()
    data = path.read_bytes()
    for one in range(1, 7):
        assert (features_of(one).numpy().tobytes() in data) == (one in (2, 4))
    assert check_all(path, 6) == 2


def test_a_lower_bound_is_kept_to(tmp_path: Path) -> None:
    path = tmp_path / "features.db"
    filled(path, 100).close()
    small = FeatureStore(10_000, "fp32", path)
    assert small.prepare(b"prefix", (64,), 100) == 10_000 // room_of(257, page_for(257))
    small.close()
    assert path.stat().st_size <= 10_000 + 5 * 2**14


def test_only_the_owner_may_read_features(tmp_path: Path) -> None:
    filled(tmp_path / "features.db", 1).close()
    assert (tmp_path / "features.db").stat().st_mode & 0o077 == 0
