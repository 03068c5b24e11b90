"""The sample store against plain lists, at its bound, damaged, full and shared."""

from __future__ import annotations

import logging
import random
import sqlite3
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toy_streams import delete_class, relabelled

from fl_elastic.errors import StoreError
from fl_elastic.streaming import SampleStore
from fl_elastic.streaming.store.bounds import LEAST_CAPACITY
from fl_elastic.streaming.store.changes import STORAGE_POLICIES, Relabelled, lottery

MEGABYTE = 2**20


def sample_of(value: float, size: int = 6) -> np.ndarray:
    return np.full(size, value, np.float32)


def open_store(place: Path, capacity: int = MEGABYTE, **options: Any) -> SampleStore:
    return SampleStore(place / "samples.db", capacity, **options)


def content(store: SampleStore) -> dict[int, tuple[float, int | None]]:
    """First number and label of everything, by id."""
    found = store.sample(10**6, labelled=False)
    return {
        int(i): (float(x.flat[0]), y)
        for i, x, y in zip(found.ids, found.x, found.y.tolist(), strict=True)
    }


actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from([None, -2, -1, 0, 1, 2])),
        st.tuples(st.just("batch"), st.integers(1, 4)),
        st.tuples(st.just("label"), st.integers(1, 12)),
        st.tuples(st.just("delete"), st.integers(1, 12)),
        st.tuples(st.just("delete class"), st.integers(-2, 2)),
        st.tuples(st.just("reopen"), st.just(0)),
    ),
    max_size=25,
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(actions)
@pytest.mark.parametrize("policy", STORAGE_POLICIES)
def test_with_room_for_all_it_is_a_table(policy: str, tmp_path: Path, steps: list[Any]) -> None:
    path = tmp_path / "samples.db"
    for old in tmp_path.glob("samples.db*"):
        old.unlink()
    store = SampleStore(path, MEGABYTE, policy=policy)
    table: dict[int, tuple[float, int | None]] = {}
    last = 0
    for kind, value in steps:
        if kind == "add":
            last += 1
            assert store.add(sample_of(last), value) == last
            table[last] = (float(last), value)
        elif kind == "batch":
            fresh = list(range(last + 1, last + 1 + value))
            last = fresh[-1]
            given_ids = store.add(
                np.stack([sample_of(i) for i in fresh]), [i % 3 for i in fresh]
            )  # fmt: skip
            assert given_ids == fresh
            table |= {i: (float(i), i % 3) for i in fresh}
        elif kind == "label":
            assert relabelled(store, value, value % 4 - 2) == (value in table)
            if value in table:
                table[value] = (table[value][0], value % 4 - 2)
        elif kind == "reopen":
            store.close()
            store = SampleStore(path, MEGABYTE, policy=policy)
        else:
            matches = {
                "delete": {value},
                "delete class": {i for i, (_, y) in table.items() if y == value},
            }
            leaving = [i for i in table if i in matches[kind]]
            gone = store.delete([value]) if kind == "delete" else delete_class(store, value)
            assert gone == len(leaving)
            for i in leaving:
                del table[i]
        assert content(store) == table
        assert len(store) == len(table) and store.seen == last
        assert store.classes == Counter(y for _, y in table.values())
        labelled = {i: y for i, (_, y) in table.items() if y is not None}
        found = store.sample(10**6)
        assert dict(zip(found.ids.tolist(), found.y.tolist(), strict=True)) == labelled
    store.close()


@pytest.mark.parametrize(
    ("policy", "size", "capacity"),
    [
        *((policy, 3, 2**19) for policy in STORAGE_POLICIES),
        ("class_balanced", 3, LEAST_CAPACITY), ("reservoir", 700, 2**19), ("reservoir", 9_000, 2**21),
    ],
)  # fmt: skip
def test_the_files_never_grow_beyond_the_bound(
    policy: str, size: int, capacity: int, tmp_path: Path
) -> None:
    store = open_store(tmp_path, capacity, policy=policy)
    largest, full_at = 0, 0
    generator = np.random.default_rng(0)
    few = size > 1000 or capacity == LEAST_CAPACITY
    for start in range(0, 1000 if few else 4000, 20):
        labels = generator.integers(0, 5, 20)
        store.add(generator.normal(size=(20, size)).astype(np.float32), labels.tolist())
        if start % 200 == 0:
            delete_class(store, int(generator.integers(0, 5)))
        largest = max(largest, sum(file.stat().st_size for file in tmp_path.iterdir()))
        full_at = max(full_at, len(store))
    assert largest <= capacity
    # And the room is used; a row and its places in the indices take about 200 bytes besides its numbers.
    assert full_at * (size * 4 + 200) > 0.35 * capacity
    store.close()


def test_threads_that_share_a_store_lose_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)

    def add(label: int) -> list[int | None]:
        return [store.add(sample_of(i), label) for i in range(150)]

    def draw() -> None:
        for _ in range(100):
            ids_of_both = {len(store.ids(labelled=known)) for known in (True, False)}
            assert max(ids_of_both) <= 300 and len(store.sample(4)) <= 4

    with ThreadPoolExecutor(3) as threads:
        zeros, ones, drawn = threads.submit(add, 0), threads.submit(add, 1), threads.submit(draw)
        assert sorted([*zeros.result(), *ones.result()]) == [*range(1, 301)]
        drawn.result()
    assert not store.rejected
    assert store.classes == {0: 150, 1: 150}


def test_a_reservoir_is_what_the_lottery_says(tmp_path: Path) -> None:
    store = open_store(tmp_path, 2**18, policy="reservoir", seed=5)
    for i in range(600):
        store.add(sample_of(i, 500), 0)
    draws = {i: lottery(5, i) for i in range(1, 601)}
    kept = {int(value) + 1 for value, _ in content(store).values()}
    assert kept == set(sorted(draws, key=draws.__getitem__)[: len(kept)])


def test_a_rare_class_is_kept_whole_and_the_others_share_the_rest(tmp_path: Path) -> None:
    store = open_store(tmp_path, 2**18, policy="class_balanced")
    generator = np.random.default_rng(0)
    for i in range(900):
        store.add(sample_of(i, 500), 7 if i in (20, 500, 899) else int(generator.random() < 0.9))
    counts = store.classes
    assert counts[7] == 3
    assert abs(counts[0] - counts[1]) <= 2
    # A class that comes late gets its share.
    for i in range(200):
        store.add(sample_of(i, 500), 4)
    counts = store.classes
    assert max(counts[0], counts[1], counts[4]) - min(counts[0], counts[1], counts[4]) <= 2


@pytest.mark.parametrize(
    ("x", "y", "reason"),
    [
        (sample_of(1, 5), 0, "shape (5,) instead of (6,)"),
        (np.full(6, np.nan, np.float32), 0, "not finite"),
        (np.array([np.inf] * 6, np.float32), 0, "not finite"),
        (np.full(6, 1e300), 0, "beyond the range"),
        (np.array(["a"] * 6), 0, "not a number"),
        (np.array([1j] * 6), 0, "not a number"),
        (sample_of(1), "cat", "label 'cat' is not a class number"),
        (sample_of(1), -(2**40), "not a class number"),
        (sample_of(1), 1.5, "not a class number"),
    ],
)
def test_samples_that_make_no_sense_are_counted_and_the_stream_goes_on(
    x: np.ndarray, y: Any, reason: str, tmp_path: Path
) -> None:
    store = open_store(tmp_path)
    assert store.add(sample_of(0), 0) == 1
    assert store.add(x, y) is None
    assert store.add(sample_of(2), 1) == 2
    ((said, count),) = store.rejected.items()
    assert reason in said and count == 1 and store.seen == 2 and len(store) == 2
    store.close()
    assert sum(open_store(tmp_path).rejected.values()) == 1


@pytest.mark.parametrize(("encoding", "bound"), [("fp16", 2e-3), ("int8", 0.5 / 255)])
def test_features_take_less_and_come_back_close(
    encoding: str, bound: float, tmp_path: Path
) -> None:
    generator = np.random.default_rng(0)
    x = generator.uniform(-2, 3, size=(30, 4, 5, 5)).astype(np.float32)
    store = open_store(tmp_path, encoding=encoding)
    store.add(x, [0] * 30, version="cut 3, prefix a")
    found = store.take(range(1, 31)).x
    assert np.abs(found - x).max() <= bound * 5 * 1.01


def test_versions_are_kept_apart(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.add(sample_of(1), 0, version="old")
    store.add(sample_of(2), 0, version="new")
    assert store.sample(5, version="new").x[:, 0].tolist() == [2.0]
    assert len(store.sample(5)) == 2
    assert store.delete(other_than_version="new") == 1 and len(store) == 1


def test_each_sample_is_drawn_once_and_the_same_again(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    labels = [0] * 90 + [1] * 9 + [2]
    store.add(np.stack([sample_of(i) for i in range(100)]), labels)
    store.add(sample_of(100), None)
    assert Counter(store.sample(100).y.tolist()) == {0: 90, 1: 9, 2: 1}
    one, two = (store.sample(10, generator=np.random.default_rng(3)).ids for _ in range(2))
    assert one.tolist() == two.tolist() and len(set(one.tolist())) == 10
    assert len(store.sample(1000)) == 100 and len(store.sample(1000, labelled=False)) == 101
    assert store.ids().tolist() == list(range(1, 101)) and store.ids(labelled=False)[-1] == 101


def test_what_it_was_made_with_holds(tmp_path: Path) -> None:
    open_store(tmp_path, policy="class_balanced").close()
    with pytest.raises(StoreError, match="was made with policy class_balanced"):
        open_store(tmp_path, policy="reservoir")
    with pytest.raises(StoreError, match="at least"):
        open_store(tmp_path, 1000)
    with pytest.raises(StoreError, match="encoding 'zip'"):
        open_store(tmp_path, encoding="zip")
    with pytest.raises(StoreError, match="say what to delete"):
        open_store(tmp_path, policy="class_balanced").delete()


def damage_header(path: Path) -> None:
    path.write_bytes(b"no database at all" + path.read_bytes()[18:])


def damage_pages(path: Path) -> None:
    data = bytearray(path.read_bytes())
    generator = random.Random(0)
    for place in range(4096, len(data), 97):
        data[place] = generator.randrange(256)
    path.write_bytes(bytes(data))


def damage_format(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE meta SET value = '99' WHERE key = 'format'")


def damage_encoding(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE meta SET value = '{' WHERE key = 'encoding'")


@pytest.mark.parametrize("damage", [damage_header, damage_pages, damage_format, damage_encoding])
def test_a_damaged_file_is_put_aside_and_a_fresh_one_started(
    damage: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path)
    for i in range(200):
        store.add(sample_of(i, 100), i % 3)
    store.close()
    damage(tmp_path / "samples.db")
    kept = (tmp_path / "samples.db").read_bytes()
    with caplog.at_level(logging.ERROR, logger="fl_elastic"):
        again = open_store(tmp_path)
    assert "put aside as samples.db.damaged-1" in caplog.text
    assert (tmp_path / "samples.db.damaged-1").read_bytes() == kept
    assert len(again) == 0 and again.add(sample_of(1, 100), 0) == 1
    again.close()


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("rejected", '{"shape": '), ("rejected", '["shape"]'), ("rejected", '{"shape": "many"}'),
        ("seen", "many"), ("last_id", "the third"), ("encoding", "{}"), ("encoding", b"\xff\xfe"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("look", ["add", "sample", "seen", "rejected", "delete"])
def test_damage_to_what_it_says_of_its_samples_costs_the_store_and_not_the_stream(
    key: str, text: str | bytes, look: str, tmp_path: Path
) -> None:
    """The pages are whole, so that SQLite finds nothing."""
    store = open_store(tmp_path)
    store.add(sample_of(1), 0)
    store.add(sample_of(1, 5), 0)
    with sqlite3.connect(tmp_path / "samples.db") as other:
        other.execute("UPDATE meta SET value = CAST(? AS TEXT) WHERE key = ?", (text, key))
    looks: dict[str, Any] = {
        "add": lambda: store.add(sample_of(2), 1), "sample": lambda: store.sample(3),
        "seen": lambda: store.seen, "rejected": lambda: store.rejected,
        "delete": lambda: store.delete([1]),
    }  # fmt: skip
    looks[look]()
    assert store.add(sample_of(3), 1) is not None
    assert store.rejected == {"file was damaged": 1} and store.seen == len(store)
    assert (tmp_path / "samples.db.damaged-1").exists()
    store.close()


def test_a_sample_of_a_length_that_none_has_costs_the_store_and_not_the_stream(
    tmp_path: Path,
) -> None:
    store = open_store(tmp_path)
    store.add([sample_of(1), sample_of(2)], [0, 1])
    with sqlite3.connect(tmp_path / "samples.db") as other:
        other.execute("UPDATE samples SET x = x'0102030405' WHERE id = 2")
    assert len(store.take([1])) == 1
    assert len(store.take([1, 2])) == 0 and store.rejected == {"file was damaged": 1}
    assert store.add(sample_of(3), 1) == 1
    store.close()


def test_a_database_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "samples.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE other(x)")
    kept = path.read_bytes()
    with pytest.raises(StoreError, match="a database with other"):
        open_store(tmp_path)
    assert path.read_bytes() == kept and [each.name for each in tmp_path.iterdir()] == [path.name]


def test_damage_while_it_is_open_costs_the_store_and_not_the_stream(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path)
    for i in range(300):
        store.add(sample_of(i, 200), i % 3)
    connection = store._database.connection
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    # As if it were too large to be held in memory.
    connection.execute("PRAGMA cache_size = 2")
    connection.execute("PRAGMA shrink_memory")
    damage_pages(tmp_path / "samples.db")
    for i in range(300):
        store.add(sample_of(i, 200), i % 3)
        store.sample(5)
    assert (tmp_path / "samples.db.damaged-1").exists()
    assert len(store) > 0 and store.rejected["file was damaged"] >= 1
    assert "a new one is started" in caplog.text
    store.close()


def test_a_file_that_cannot_be_opened_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(StoreError, match="cannot open the sample store"):
        SampleStore(tmp_path / "folder", MEGABYTE)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot open the sample store"):
        SampleStore(tmp_path / "file" / "samples.db", MEGABYTE)


def test_a_full_disk_costs_samples_and_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path)
    store.add(sample_of(0, 2000), 0)
    # The same answer as that of a disk without room.
    connection = store._database.connection
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages + 30}")
    kept = [store.add(sample_of(i, 2000), 0) for i in range(30)]
    assert kept[0] is not None and kept[-1] is None
    assert store.rejected["disk"] > 0 and "could not be written" in caplog.text
    connection.execute("PRAGMA max_page_count = 100000")
    assert store.add(sample_of(1, 2000), 0) is not None
    assert len(store.sample(100)) == len(store)
    store.close()


def draws_labels_and_deletes(path: Path, turns: Connection) -> None:
    store = SampleStore(path, 2**20)
    turns.send("ready")
    generator, labelled, drawn = np.random.default_rng(0), 0, 0
    while turns.recv():
        found = store.sample(16, generator=generator)
        assert all(
            (x == x[0]).all() and int(x[0]) % 5 == y for x, y in zip(found.x, found.y, strict=True)
        )
        drawn += len(found)
        waiting = store.sample(4, labelled=False, generator=generator)
        for each in waiting.ids[np.ma.getmaskarray(waiting.y)].tolist():
            value = store.take([each])
            change = [Relabelled(each, int(value.x[0][0]) % 5)] if len(value) else []
            labelled += store.change(change) == [each]
        store.delete(ids=found.ids[:1].tolist())
    turns.send((drawn, labelled))
    store.close()


@pytest.mark.slow
def test_one_process_adds_while_another_draws_labels_and_deletes(tmp_path: Path) -> None:
    path, forked = tmp_path / "samples.db", get_context("fork")
    turns, theirs = forked.Pipe()
    trainer = forked.Process(target=draws_labels_and_deletes, args=(path, theirs), daemon=True)
    trainer.start()
    theirs.close()
    assert turns.recv() == "ready"
    store = SampleStore(path, 2**20)
    for i in range(600):
        store.add(sample_of(i, 300), None if i % 7 == 0 else i % 5)
        if i % 3 == 0:
            turns.send(True)
    turns.send(False)
    drawn, labelled = turns.recv()
    trainer.join(60)
    assert trainer.exitcode == 0
    assert drawn > 1000 and labelled > 5
    everything = store.sample(10**6, labelled=False)
    assert dict(Counter(everything.y.tolist())) == store.classes
    assert all(
        y is None or int(x[0]) % 5 == y
        for x, y in zip(everything.x, everything.y.tolist(), strict=True)
    )
