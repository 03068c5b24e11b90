"""What a store takes on the disk, looked at from another process at any moment, and what its transactions write."""

from __future__ import annotations

import logging
import os
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from foreseen_log import watched
from slow_ones import slow_unless
from toy_streams import delete_class, relabelled

from fl_elastic.errors import StoreError
from fl_elastic.streaming import SampleStore
from fl_elastic.streaming.store.bounds import LEAST_CAPACITY
from fl_elastic.streaming.store.changes import STORAGE_POLICIES, Offer


def stream_for_ever(path: Path, capacity: int, policy: str, size: int) -> None:
    """Add, label and delete, as fast as it goes."""
    store, generator = SampleStore(path, capacity, policy=policy), np.random.default_rng(0)
    while True:
        for many in (1, 7, 64):
            x = generator.normal(size=(many, size)).astype(np.float32)
            ids = store.add(x, generator.integers(-1, 4, many).tolist())
            for each in ids[:3]:
                if each is not None:
                    relabelled(store, each, 2)
        store.sample(8)
        if generator.random() < 0.2:
            delete_class(store, int(generator.integers(-1, 4)))


@contextmanager
def streaming(path: Path, capacity: int, policy: str, size: int) -> Iterator[int]:
    """Run `stream_for_ever` in a process of its own."""
    child = os.fork()
    if child == 0:
        try:
            stream_for_ever(path, capacity, policy, size)
        finally:
            os._exit(1)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def on_disk(folder: Path) -> int:
    """Bytes of all files."""
    total = 0
    for name in ("samples.db", "samples.db-wal", "samples.db-shm"):
        try:
            total += (folder / name).stat().st_size
        except FileNotFoundError:
            continue
    assert {each.name for each in folder.iterdir()} <= {
        "samples.db", "samples.db-wal", "samples.db-shm", "samples.db-journal"
    }  # fmt: skip
    return total


def smallest(size: int) -> list[tuple[int, int, str]]:
    """The smallest store of each policy, for samples of so many numbers."""
    return [(LEAST_CAPACITY, size, policy) for policy in STORAGE_POLICIES]


@pytest.mark.parametrize(
    ("capacity", "size", "policy"),
    [
        *smallest(10),
        (2**19, 300, "reservoir"),
        (2**21, 9000, "reservoir"),
        (2**23, 100, "class_balanced"),
    ],
)
def test_at_no_moment_is_it_more_than_its_bound(
    capacity: int, size: int, policy: str, tmp_path: Path
) -> None:
    path, sizes = tmp_path / "samples.db", []
    with streaming(path, capacity, policy, size):
        end = time.monotonic() + 0.5
        # On a slow machine longer, until it has been seen at work.
        while time.monotonic() < end or len(sizes) <= 100 or len(set(sizes)) < 10:
            sizes.append(on_disk(tmp_path))
    # However long the machine let this process wait, it has looked often and at a store in use.
    assert len(sizes) > 100 and max(sizes) > 0
    assert max(sizes) <= capacity, f"{max(sizes)} bytes of {capacity}"
    # What was killed is within its bound again as soon as it is opened, and loses nothing to its hard limit.
    with SampleStore(path, capacity, policy=policy) as store:
        assert store.used_bytes == on_disk(tmp_path) <= capacity
        assert store.rejected == {} and store.seen > 0


@pytest.mark.parametrize(
    ("capacity", "size", "policy"),
    slow_unless(
        lambda capacity, _, policy: policy == "class_balanced",
        [*smallest(5), (2**18, 40, "class_balanced")],
    ),
)
def test_a_long_stream_at_the_bound_wears_nothing_out(
    capacity: int, size: int, policy: str, tmp_path: Path
) -> None:
    """Rows that come and go leave gaps in the indices: that must not cost the places of samples one by one."""
    store, generator = (
        SampleStore(tmp_path / "samples.db", capacity, policy=policy),
        np.random.default_rng(1),
    )
    # Waiting for the disk is not what is tested.
    store._database.connection.execute("PRAGMA synchronous = OFF")
    counts = []
    for _ in range(20):
        x = generator.normal(size=(200, size)).astype(np.float32)
        store.add(x, generator.integers(0, 3, 200).tolist())
        counts.append(len(store))
        assert on_disk(tmp_path) <= capacity
    assert store.rejected == {} and store.seen == 4_000
    assert counts[-1] > 0.5 * max(counts) and counts[-1] > 50
    store.close()


def test_no_transaction_writes_more_into_the_log_than_was_foreseen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreseen = watched(monkeypatch)
    generator = np.random.default_rng(2)
    log = tmp_path / "samples.db-wal"
    for number, (capacity, size) in enumerate([(LEAST_CAPACITY, 4), (2**19, 100), (2**20, 3000)]):
        for old in tmp_path.iterdir():
            old.unlink()
        store = SampleStore(tmp_path / "samples.db", capacity, policy="class_balanced", seed=number)
        store._database.connection.execute("PRAGMA synchronous = OFF")
        for _ in range(400):
            many = int(generator.integers(1, 3))
            foreseen.clear()
            before = log.stat().st_size
            x = generator.normal(size=(many, size)).astype(np.float32)
            store.change([Offer(each, int(generator.integers(0, 9))) for each in x])
            # Within one call the log may have been cut off in between, which makes this easier, never harder.
            assert log.stat().st_size - before <= sum(foreseen)
            if generator.random() < 0.1:
                foreseen.clear()
                before = log.stat().st_size
                delete_class(store, int(generator.integers(0, 9)))
                assert log.stat().st_size - before <= sum(foreseen)
        store.close()


def test_a_small_store_of_features_is_mostly_features(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    with SampleStore(tmp_path / "s.db", 400_000, encoding="int8") as store:
        for _ in range(12):
            store.add(draw.random((100, 64, 2, 2), np.float32), draw.integers(0, 10, 100).tolist())
        # 264 bytes each; pages of half the size would have room for one of them, and waste the rest.
        assert len(store) * 264 > 0.4 * store.capacity_bytes


def test_a_sample_that_is_too_large_is_refused_and_counted(tmp_path: Path) -> None:
    store = SampleStore(tmp_path / "samples.db", 2**18)
    assert store.add(np.zeros(2**16, np.float32), 0) is None
    ((why, count),) = store.rejected.items()
    assert "262144 bytes are too many" in why and count == 1
    # It has not decided what the others look like.
    assert store.add(np.zeros(10, np.float32), 0) == 1
    assert on_disk(tmp_path) <= 2**18 and store.seen == 1


def test_opened_with_less_than_it_takes(tmp_path: Path) -> None:
    store = SampleStore(tmp_path / "samples.db", 2**20)
    store.add(np.zeros((800, 200), np.float32), [0] * 800)
    held = len(store)
    store.close()
    with pytest.raises(StoreError, match=r"too many for a capacity of 131072: give (\d+)") as said:
        SampleStore(tmp_path / "samples.db", LEAST_CAPACITY)
    least = int(str(said.value).rsplit("give ", 1)[1].split(",")[0])
    with SampleStore(tmp_path / "samples.db", least) as again:
        assert len(again) == held


def read_until_told(path: Path, told: Connection) -> None:
    told.recv()
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN")
    connection.execute("SELECT COUNT(*) FROM samples").fetchone()
    told.send("reading")
    told.recv()


@pytest.mark.slow
def test_one_who_reads_for_ever_costs_samples_and_not_the_bound(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Before there is a connection that it would inherit.
    forked = get_context("fork")
    told, theirs = forked.Pipe()
    reader = forked.Process(
        target=read_until_told, args=(tmp_path / "samples.db", theirs), daemon=True
    )
    reader.start()
    store = SampleStore(tmp_path / "samples.db", 2**18)
    store.add(np.zeros(100, np.float32), 0)
    told.send("begin")
    assert told.recv() == "reading"
    with caplog.at_level(logging.WARNING, logger="fl_elastic"):
        kept = [store.add(np.full(100, i, np.float32), 0) for i in range(300)]
    assert kept[0] is not None and kept[-1] is None
    assert on_disk(tmp_path) <= 2**18
    assert store.rejected["disk"] == kept.count(None)
    # Said now and then, not three hundred times.
    assert 1 <= caplog.text.count("reads for too long") < 12
    told.send("enough")
    reader.join(30)
    assert reader.exitcode == 0
    assert store.add(np.zeros(100, np.float32), 0) is not None
    store.close()
    with sqlite3.connect(tmp_path / "samples.db") as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"


def test_another_process_that_puts_it_aside_is_followed(tmp_path: Path) -> None:
    first, second = (SampleStore(tmp_path / "samples.db", 2**18) for _ in range(2))
    assert first.add(np.zeros(5, np.float32), 1) == 1
    second._database.quarantine("it is tried out")
    assert second.add(np.ones(7, np.float32), 3) == 1
    # The first one neither writes into what was put aside, nor puts the fresh one aside.
    assert first.sample(5).x.tolist() == [[1.0] * 7]
    assert first.add(np.zeros(7, np.float32), 1) == 2 and len(second) == 2
    first._database.quarantine("the same damage, seen late")
    assert len(list(tmp_path.glob("*.damaged-?"))) == 2
    first.close()
    second.close()
