"""A store whose features are written with other bits from some sample on."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from foreseen_log import watched
from numpy.typing import NDArray
from slow_ones import slow_unless

from fl_elastic.errors import StoreError
from fl_elastic.streaming import SampleStore
from fl_elastic.streaming.store.bounds import LEAST_CAPACITY
from fl_elastic.streaming.store.policies import STORAGE_POLICIES

BYTES = {"raw": 400, "fp16": 200, "int8": 108}


def features(many: int, size: int = 100, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(many, size)).astype(np.float32)


def lengths(place: Path) -> list[int]:
    with closing(sqlite3.connect(place / "samples.db")) as opened:
        return [row[0] for row in opened.execute("SELECT LENGTH(x) FROM samples ORDER BY id")]


def open_store(
    place: Path, capacity: int = 2**20, encoding: str = "int8", **options: str
) -> SampleStore:
    return SampleStore(place / "samples.db", capacity, encoding=encoding, **options)


@pytest.mark.parametrize("order", [("int8", "fp16"), ("fp16", "int8"), ("int8", "raw", "fp16")])
def test_what_was_written_before_is_still_read(order: tuple[str, ...], tmp_path: Path) -> None:
    x = features(5 * len(order))
    with open_store(tmp_path, encoding=order[0]) as store:
        for stage, name in enumerate(order):
            store.write_as(name)
            store.add(x[5 * stage : 5 * stage + 5], [stage] * 5)
        ids = np.random.default_rng(1).permutation(len(x)) + 1
        found = store.take(ids)
    assert lengths(tmp_path) == [BYTES[name] for name in order for _ in range(5)]
    np.testing.assert_array_equal(found.ids, ids)
    np.testing.assert_allclose(found.x, x[ids - 1], atol=0.03)
    exact = [stage for stage, name in enumerate(order) if name == "raw"]
    of_stage = found.y[:, None] == np.array(exact, int)
    np.testing.assert_array_equal(found.x[of_stage.any(1)], x[ids - 1][of_stage.any(1)])
    # A later life goes on as the last one did, though it names what the file was made with.
    with open_store(tmp_path, encoding=order[0]) as again:
        again.add(x[0], 0)
        assert len(again.take(range(1, len(x) + 2)).x) == len(x) + 1
    assert lengths(tmp_path)[-1] == BYTES[order[-1]]


def test_a_process_that_has_it_open_reads_the_new_form(tmp_path: Path) -> None:
    x = features(2)
    with open_store(tmp_path) as store, open_store(tmp_path) as reader:
        store.add(x[0], 0)
        assert len(reader.sample(9)) == 1
        store.write_as("fp16")
        store.add(x[1], 0)
        np.testing.assert_allclose(reader.take([2]).x[0], x[1], atol=1e-2)
        assert reader.label(2, 5) and reader.delete([1]) == 1
        # And its own writing does not unsay what it did not know.
        store.add(x[0], 1)
        np.testing.assert_allclose(store.take([3, 2]).x, x, atol=1e-2)
    assert lengths(tmp_path) == [200, 200]


def test_before_the_first_sample_it_is_how_the_first_is_written(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.write_as("fp16")
        store.add(features(1)[0], 0)
    assert lengths(tmp_path) == [200]


def test_what_cannot_be_told_apart_stays_as_it_is(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.add(features(1, size=8)[0], 0)
        with pytest.raises(StoreError, match="8 numbers"):
            store.write_as("fp16")
        with pytest.raises(StoreError, match="int4"):
            store.write_as("int4")
        store.add(features(1, size=8)[0], 0)
        assert len(store.sample(9)) == 2
    (tmp_path / "inputs").mkdir()
    with open_store(tmp_path / "inputs", encoding="raw") as store:
        store.add(np.arange(100), 0)
        with pytest.raises(StoreError, match="no features"):
            store.write_as("int8")
        store.add(np.arange(100), 0)
        assert store.sample(9).x.dtype == np.int64


@pytest.mark.parametrize(
    ("capacity", "size", "policy"),
    slow_unless(
        lambda capacity, _, policy: policy == "ring" or capacity > LEAST_CAPACITY,
        [
            *((LEAST_CAPACITY, 20, policy) for policy in STORAGE_POLICIES.names()),
            (2**18, 300, "class_balanced"),
        ],
    ),
)
def test_a_full_store_keeps_to_its_bound_as_rows_become_larger(
    capacity: int, size: int, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreseen = watched(monkeypatch)
    log, generator = tmp_path / "samples.db-wal", np.random.default_rng(2)
    with open_store(tmp_path, capacity, policy=policy) as store:
        store._database.connection.execute("PRAGMA synchronous = OFF")
        sizes, offered = [], 0
        for name in ("int8", "raw", "int8", "fp16", "raw"):
            store.write_as(name)
            for many in [1, 7, 64] * 10:
                foreseen.clear()
                before = log.stat().st_size if log.exists() else 0
                labels = generator.integers(0, 4, many)
                store.add(features(many, size, offered), labels.tolist())
                offered += many
                grown = log.stat().st_size - before
                assert grown <= sum(foreseen), f"{grown} bytes, foreseen {foreseen}"
                assert store.used_bytes <= capacity
                foreseen.clear()
                before = log.stat().st_size
                assert store.label(int(store.draw(1, generator=generator)[0]), 2)
                assert log.stat().st_size - before <= sum(foreseen)
            sizes.append(len(store))
        assert store.rejected == {} and store.seen == offered
        # As many fit as ever fitted of these; a part of the gaps in the file is lost on the way.
        assert sizes[1] < 0.8 * sizes[0] and 0.5 * sizes[1] < sizes[-1] <= 1.5 * sizes[1]
        assert len(store.sample(10**6)) == sizes[-1]


def test_rows_are_foreseen_as_another_process_has_written_them_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreseen, log = watched(monkeypatch), tmp_path / "samples.db-wal"
    with open_store(tmp_path, 2**22) as first, open_store(tmp_path, 2**22) as second:
        first.add(features(1, 8000)[0], 0)
        second.write_as("raw")
        foreseen.clear()
        before = log.stat().st_size
        first.add(features(9, 8000), [0] * 9)
        assert log.stat().st_size - before <= sum(foreseen)
        assert len(second.sample(10)) == 10
    assert lengths(tmp_path) == [8008] + [32000] * 9
