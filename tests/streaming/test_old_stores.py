"""A store's file of an earlier release is read as it was, goes on as it would have, and is written alike today.

The files in ``old_state`` were written by `WRITERS` when the store was fourteen files; ``stores.json`` is what that
release then read, drew and kept.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_elastic.streaming import SampleStore
from fl_elastic.streaming.store.changes import Offer, Relabelled, Withdrawn

OLD = Path(__file__).parents[1] / "old_state"
CAPACITY = 2**17


def numbers(first: int, many: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Samples that no generator has drawn."""
    size = int(np.prod(shape))
    row, column = np.arange(first, first + many)[:, None], np.arange(size)[None]
    values = (row * 13 + column * 7) % 251
    if np.dtype(dtype).kind == "f":
        values = values / 8 - 11
    return np.asarray(values.astype(dtype).reshape(many, *shape))


def classes(first: int, many: int) -> list[int]:
    """Two classes, one of them rare."""
    return [int(i % 5 == 0) for i in range(first, first + many)]


def times(first: int, many: int) -> list[float]:
    return [1000.0 + i / 4 for i in range(first, first + many)]


def pictures(store: SampleStore, first: int) -> None:
    """Bytes: late labels, a sample that makes no sense, one that is withdrawn, and what is noted beside."""
    x = numbers(first, 12, (3, 4, 2), "uint8")
    store.add(x, classes(first, 12), times(first, 12))
    ids = [store.add(each, None, t=2000.0 + first) for each in x[:3]]
    store.label(int(ids[0] or 0), 1)
    store.add(np.zeros((2, 2), np.uint8), 0, t=0.0)
    store.add(x[4], 1, t=float("inf"))
    store.add(x[5], 7, t=5.0, outputs=[0.25, -1.5])
    number = store.seen + 4
    store.change(
        [Offer(x[6], 1, 3000.0, None, number), Relabelled(2, 1), Withdrawn(3), Offer(x[7], 0, 1.0)],
        "", lambda left: {"account": f"noted {first} {len(left)}"},
    )  # fmt: skip
    store.delete(ids=[1, first + 5])


def vectors(store: SampleStore, first: int) -> None:
    """More than there is room for, one class four times as frequent."""
    x = numbers(first, 90, (300,), "float32")
    store.add(x, classes(first, 90), times(first, 90))
    store.delete(label=1, before=1000.0 + first / 4 + 3)


def features(store: SampleStore, first: int) -> None:
    """Channels of few bits, with class scores, of two frozen prefixes."""
    x, told = numbers(first, 260, (2, 8, 8), "float32"), numbers(first, 260, (3,), "float32")
    for start, version in ((0, "cut 3"), (20, "cut 4")):
        end = 20 if start == 0 else 260
        store.add(
            x[start:end], classes(first + start, end - start), times(first + start, end - start),
            outputs=told[start:end], version=version,
        )  # fmt: skip
    store.delete(other_than_version="cut 4", before=1005.0)


def halves(store: SampleStore, first: int) -> None:
    """Numbers of another type than the store's, some of them without a label."""
    store.add(
        numbers(first, 9, (5,), "float64"), [None, 0, 1] * 3, times(first, 9), version="cut 1"
    )
    store.add(numbers(first, 3, (5,), "int16"), [0, 1, 0], 7.0, version="cut 1")


def switches(store: SampleStore, first: int) -> None:
    """Single truths."""
    store.add(numbers(first, 8, (), "uint8") % 2 == 0, classes(first, 8), times(first, 8))


WRITERS: dict[str, tuple[str, str, int, Callable[[SampleStore, int], None]]] = {
    "pictures": ("reservoir", "raw", 3, pictures),
    "vectors": ("class_balanced", "raw", 4, vectors),
    "features": ("ring", "int8", 5, features),
    "halves": ("class_balanced", "fp16", 6, halves),
    "switches": ("ring", "raw", 7, switches),
}


def opened(name: str, path: Path) -> SampleStore:
    policy, encoding, seed, _ = WRITERS[name]
    return SampleStore(path, CAPACITY, policy=policy, encoding=encoding, seed=seed)


def digest(array: np.ndarray | None) -> str:
    if array is None:
        return "none"
    about = f"{array.dtype.str} {array.shape}".encode()
    return hashlib.sha256(about + np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def reading(store: SampleStore) -> dict[str, Any]:
    """All that a store says of itself, as JSON can hold it; an earlier release said -1 for no label."""
    found = store.take(range(store.seen + 20))
    return {
        "ids": found.ids.tolist(), "y": [-1 if y is None else y for y in found.y.tolist()], "t": found.t.tolist(),
        # What was held in eight bits is multiplied out again, which processors round differently.
        "x": "near" if store.noted("encoding_name") == "int8" else digest(found.x),
        "shape": [*found.x.shape], "dtype": found.x.dtype.str, "outputs": digest(found.outputs),
        "classes": {str(-1 if y is None else y): n for y, n in store.classes.items()},
        "seen": store.seen, "rejected": store.rejected, "noted": store.noted("account"),
        "draws": {
            f"{how} {n} {labelled} {version}": store.draw(
                n, how=how, labelled=labelled, version=version, generator=np.random.default_rng(n)
            ).tolist()
            for how in ("uniform", "class_balanced", "recent", "newest")
            for n, labelled, version in ((4, True, None), (11, False, None), (6, True, "cut 4"))
            if version is None or len(store.sample(1, version=version))
        },
    }  # fmt: skip


def rows(path: Path) -> dict[str, list[Any]]:
    """The file itself: schema, and every row of every table."""
    with closing(sqlite3.connect(path)) as connection:
        return {
            "schema": connection.execute(
                "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY name"
            ).fetchall(),
            "meta": connection.execute("SELECT * FROM meta ORDER BY key").fetchall(),
            "samples": connection.execute("SELECT * FROM samples ORDER BY slot").fetchall(),
            "classes": connection.execute("SELECT * FROM classes WHERE n > 0").fetchall(),
            "pages": connection.execute("PRAGMA page_size").fetchall(),
        }


def expected(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((OLD / "stores.json").read_text())[name]
    return found


@pytest.mark.parametrize("name", WRITERS)
def test_an_old_store_is_read_as_it_was(name: str, tmp_path: Path) -> None:
    shutil.copy(OLD / f"store-{name}.db", tmp_path / "samples.db")
    with opened(name, tmp_path / "samples.db") as store:
        assert reading(store) == expected(name)["read"]
    assert rows(tmp_path / "samples.db") == rows(OLD / f"store-{name}.db")
    assert [each.name for each in tmp_path.iterdir()] == ["samples.db"]


@pytest.mark.parametrize("name", WRITERS)
def test_an_old_store_goes_on_as_it_would_have(name: str, tmp_path: Path) -> None:
    shutil.copy(OLD / f"store-{name}.db", tmp_path / "samples.db")
    with opened(name, tmp_path / "samples.db") as store:
        for first in (300, 700):
            WRITERS[name][3](store, first)
        assert reading(store) == expected(name)["later"]


@pytest.mark.parametrize("name", WRITERS)
def test_what_is_written_today_is_what_was_written_then(name: str, tmp_path: Path) -> None:
    with opened(name, tmp_path / "samples.db") as store:
        WRITERS[name][3](store, 0)
    assert rows(tmp_path / "samples.db") == rows(OLD / f"store-{name}.db")


def test_features_in_few_bits_are_those_that_were_given(tmp_path: Path) -> None:
    shutil.copy(OLD / "store-features.db", tmp_path / "samples.db")
    with opened("features", tmp_path / "samples.db") as store:
        found = store.sample(1000, labelled=False)
    given = numbers(0, 260, (2, 8, 8), "float32")[found.ids - 1]
    assert len(found) > 100 and np.abs(found.x - given).max() <= 251 / 8 / 255 / 2 * 1.001
    assert found.outputs is not None
    assert np.array_equal(found.outputs, numbers(0, 260, (3,), "float32")[found.ids - 1])
