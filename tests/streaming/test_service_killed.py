"""A service is killed again and again, over each kind of source: every row is learned once and stored once."""

from __future__ import annotations

import json
import os
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked_service import Life, arguments
from slow_ones import slow_unless
from toy_streams import samples_of

from fl_elastic.closed_form.running_sums import RunningSums
from fl_elastic.streaming import SampleStore
from fl_elastic.streaming.learner_state import LearnerState, load_state

KILLS = [4, pytest.param(50, marks=pytest.mark.slow)]
ROWS_PER_LIFE = 90
SOLVED = ("--closed-form", "--model", "forked_service:table")
INSIDE = (*SOLVED, "--read", "input@flat")
TAKES_ALL = 8 * 2**20


@pytest.fixture(autouse=True)
def no_life_is_left() -> Iterator[None]:
    yield
    Life.end_all()


def rows_from(start: int, count: int) -> list[tuple[list[float], int]]:
    """Rows whose first number says which they are."""
    generator = np.random.default_rng(start)
    labels = generator.integers(2, size=count)
    x = generator.normal(size=(count, 3)) + 3 * labels[:, None]
    return [([float(start + i), *map(float, x[i].round(3))], int(labels[i])) for i in range(count)]


def saved(folder: Path) -> LearnerState:
    state = load_state(folder / "state" / "learner.state")
    assert state is not None
    return state


def each_once(folder: Path, rows: int, refused: int = 0) -> None:
    """Counts are exact, and every row is in the store or held out, under its own number."""
    state = saved(folder)
    progress, record = state.progress, state.record
    assert progress.observed == progress.labelled == rows
    assert sum(progress.rejected.values()) == refused
    assert sum(point.samples for point in record.points) + record.samples == rows
    held = samples_of(state.recent)
    if state.rule.head is not None:
        # Each row is in the sums or held out; the first number of the rows says that it is each once.
        sums = RunningSums.of_state(state.rule.head.sums)
        learned = rows - len(held["held.x"])
        assert sums.weight == learned
        first = learned * sums.mean[0] + held["held.x"][:, 0].sum()
        assert first == pytest.approx(rows * (rows - 1) / 2, rel=1e-9)
    with SampleStore(folder / "state" / "samples.db", TAKES_ALL) as store:
        everything = store.sample(10**6)
        assert store.seen == len(everything) == len(store) == rows - len(held["held.x"])
        assert store.rejected == {}
    ids = [*everything.ids.tolist(), *held["held.n"].tolist()]
    first = [*everything.x[:, 0].tolist(), *held["held.x"][:, 0].tolist()]
    assert sorted(ids) == list(range(1, rows + 1))
    assert sorted(first) == [float(i) for i in range(rows)]
    # Refused rows have no number.
    assert refused or all(each == x + 1 for each, x in zip(ids, first, strict=True))
    assert not list((folder / "state").glob("*.damaged*"))


def marks(folder: Path) -> tuple[Any, ...]:
    """What changes whenever the service keeps something."""
    found = []
    for name in ("events.log", "learner.state", "samples.db-wal"):
        try:
            told = os.stat(folder / "state" / name)
        except OSError:
            continue
        found.append((name, told.st_size, told.st_mtime_ns))
    return tuple(found)


def killed_at_work(folder: Path, given: list[str], draw: random.Random) -> None:
    """Start a service, and kill it a moment after it has begun to keep something."""
    before = marks(folder)
    life = Life(given, folder / "said")
    try:
        life.waits_for(lambda: marks(folder) != before)
        time.sleep(draw.choice([0.0, 0.01, 0.05, 0.1]) * draw.random())
    finally:
        life.kill()


@pytest.mark.parametrize("kills", KILLS)
@pytest.mark.parametrize(
    ("batch", "solved"),
    slow_unless(lambda batch, solved: batch == 1, [(1, ()), (7, SOLVED), (7, INSIDE)]),
)
def test_a_table(batch: int, solved: tuple[str, ...], kills: int, tmp_path: Path) -> None:
    draw, path, written, nonsense = random.Random(kills), tmp_path / "table.csv", 0, 0
    path.write_text("n,a,b,c,label\n")
    given = arguments(tmp_path, f"csv:{path}", "--batch", batch, *solved)
    for _ in range(kills):
        with open(path, "a") as stream:
            for x, y in rows_from(written, ROWS_PER_LIFE):
                stream.write(f"{','.join(map(str, x))},{y}\n")
            stream.write("what,is,this\n\n")
        written, nonsense = written + ROWS_PER_LIFE, nonsense + 1
        killed_at_work(tmp_path, [*given, "--follow"], draw)
    assert Life(given, tmp_path / "said").ended() == 0, (tmp_path / "said").read_text()
    each_once(tmp_path, written, nonsense)
    assert Life(given, tmp_path / "said").ended() == 0
    each_once(tmp_path, written, nonsense)


@pytest.mark.slow
@pytest.mark.parametrize("kills", KILLS)
def test_a_folder(kills: int, tmp_path: Path) -> None:
    draw, place, written = random.Random(kills), tmp_path / "in", 0
    place.mkdir()
    given = arguments(tmp_path, f"dir:{place}", "--batch", 4)
    for life in range(kills):
        for part in range(3):
            rows = rows_from(written, ROWS_PER_LIFE // 3)
            # Later files may have earlier names.
            name = f"{draw.choice('abc')}{life}-{part}.npz"
            with open(tmp_path / "half", "wb") as stream:
                np.savez(
                    stream, x=np.array([x for x, _ in rows], np.float32), y=[y for _, y in rows]
                )
            (tmp_path / "half").rename(place / name)
            written += len(rows)
        killed_at_work(tmp_path, [*given, "--follow"], draw)
    assert Life(given, tmp_path / "said").ended() == 0, (tmp_path / "said").read_text()
    assert not list(place.glob("*.npz")) and len(list((place / "done").iterdir())) == 3 * kills
    state = saved(tmp_path)
    assert state.progress.observed == state.progress.labelled == written
    with SampleStore(tmp_path / "state" / "samples.db", TAKES_ALL) as store:
        everything = store.sample(10**6)
        assert store.seen == len(everything)
    held = samples_of(state.recent)
    first = [*everything.x[:, 0].tolist(), *held["held.x"][:, 0].tolist()]
    assert sorted(first) == [float(i) for i in range(written)]


class Sender:
    """Sends rows one after the other; what is not answered is sent again, under the same name."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.given: dict[int, int] = {}

    def connected(self, life: Life) -> socket.socket:
        while True:
            try:
                return socket.create_connection(("127.0.0.1", self.port), timeout=60)
            except OSError:
                assert not life.is_over(), life.said.read_text()
                time.sleep(0.005)

    def send(self, life: Life, rows: list[tuple[list[float], int]], kill_at: int | None) -> int:
        """Send rows, and kill the service when so many were answered; return how many were."""
        with self.connected(life) as connection, connection.makefile() as answers:
            for place, (x, y) in enumerate(rows):
                line = json.dumps({"id": f"row-{x[0]:.0f}", "x": x, "y": y})
                try:
                    connection.sendall(line.encode() + b"\n")
                    if place == kill_at:
                        life.kill()
                    said = answers.readline()
                except OSError:
                    said = ""
                if not said.endswith("\n"):
                    return place
                number = json.loads(said)["sample_id"]
                assert number is not None and self.given.setdefault(int(x[0]), number) == number
        return len(rows)


@pytest.mark.parametrize("kills", KILLS)
def test_a_socket(kills: int, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        sender = Sender(free.getsockname()[1])
    given = arguments(tmp_path, f"socket:127.0.0.1:{sender.port}")
    draw, done = random.Random(kills), 0
    for _ in range(kills):
        life = Life(given, tmp_path / "said")
        rows = rows_from(0, done + ROWS_PER_LIFE)[done:]
        done += sender.send(life, rows, draw.randrange(1, ROWS_PER_LIFE))
    life = Life(given, tmp_path / "said")
    rest = rows_from(0, done + 10)[done:]
    assert sender.send(life, rest, None) == len(rest)
    assert life.stop() == 0, life.said.read_text()
    rows_sent = done + len(rest)
    assert sorted(sender.given.values()) == list(range(1, rows_sent + 1))
    each_once(tmp_path, rows_sent)
