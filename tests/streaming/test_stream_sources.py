"""Tables, folders and sockets as streams."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from line_client import Client
from real_processes import free_port
from slow_ones import slow_unless
from toy_streams import blobs, closed, learner_in

from fl_elastic.errors import RegistryError, StreamDataError, StreamError
from fl_elastic.streaming import csv_source
from fl_elastic.streaming.intake import checked_label
from fl_elastic.streaming.sources import SOURCES, SourceReading, open_source


def test_kinds_of_sources(tmp_path: Path) -> None:
    assert SOURCES.names() == ["csv", "dir", "socket"]
    with pytest.raises(RegistryError, match="did you mean 'csv'"):
        open_source("cvs:a")
    for wrong in ("csv", "csv:", str(tmp_path)):
        with pytest.raises(StreamError, match="not of the form"):
            open_source(wrong)
    for missing in (f"csv:{tmp_path}/none.csv", f"dir:{tmp_path}/none"):
        with pytest.raises(StreamError, match="there is no"):
            open_source(missing)
    for wrong in ("socket:nowhere", "socket:127.0.0.1:x", "socket:127.0.0.1:99999"):
        with pytest.raises(StreamError, match="cannot listen"):
            open_source(wrong)


def test_a_table(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,time,b,Label\n1,10,2,0\n\n3,11,4,\n5,12,x,1\n7,8\n9,13,10,1")
    readings = list(open_source(f"csv:{path}"))
    assert [r.x.tolist() for r in readings[:2]] == [[1, 2], [3, 4]]
    assert [r.y for r in readings[:2]] == [0, None]
    assert readings[2].x == "'x' in column 'b' is not a number"
    assert readings[3].x == "2 fields instead of 4"
    assert readings[4].x.tolist() == [9, 10] and len(readings) == 5
    assert [r.y for r in open_source(f"csv:{path}", after=readings[2].position)][1:] == [1]
    (tmp_path / "empty.csv").write_text("")
    assert list(open_source(f"csv:{tmp_path}/empty.csv")) == []


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
def test_a_table_in_another_encoding_is_refused_for_it(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,label\n1,0\n", encoding=encoding)
    with pytest.raises(StreamDataError, match=r"is no UTF-8 text: .* Save it as CSV in UTF-8"):
        list(open_source(f"csv:{path}"))


@pytest.mark.parametrize("header", ["time,a,b,class", "a,b,time,class", "a,b,class,time"])
def test_the_time_is_never_the_label(header: str, tmp_path: Path) -> None:
    path, row = tmp_path / "t.csv", {"a": 1, "b": 2, "class": 3, "time": 1_700_000_000}
    path.write_text(f"{header}\n{','.join(str(row[name]) for name in header.split(','))}\n")
    (reading,) = open_source(f"csv:{path}")
    assert (reading.x.tolist(), reading.y) == ([1, 2], 3)


ENDS = {"LF": "\n", "CR LF": "\r\n", "CR": "\r"}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("last", [True, False])
def test_lines_end_as_they_do_anywhere(
    end: str, last: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.csv"
    rows = [f"{i},{i % 2}" for i in range(30)]
    path.write_bytes((end.join(["a,label", *rows, "", "30,"]) + end * last).encode())
    expected = [([i], i % 2) for i in range(30)] + [([30], None)]
    # Whatever is read at once: the two bytes of an end may come apart.
    for part in (2**16, 1, 3):
        monkeypatch.setattr(csv_source, "_PART", part)
        readings = list(open_source(f"csv:{path}"))
        assert [(each.x.tolist(), each.y) for each in readings] == expected
    again = list(open_source(f"csv:{path}", after=readings[9].position))
    assert [each.x.tolist() for each in again] == [[i] for i in range(10, 31)]


@pytest.mark.parametrize("end", slow_unless("\r\n".__eq__, ENDS.values()))
def test_a_table_that_grows_by_bytes(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_source, "POLL_SECONDS", 0.001)
    path = tmp_path / "t.csv"
    path.write_bytes(b"")
    readings, found = open_source(f"csv:{path}", follow=True), []
    for byte in end.join(["a,label", "1,0", "2,1", ""]).encode():
        with open(path, "ab") as stream:
            stream.write(bytes([byte]))
        for reading in readings:
            if reading.is_silence:
                break
            found.append((reading.x.tolist(), reading.y))
    assert found == [([1], 0), ([2], 1)]


def test_a_folder(tmp_path: Path) -> None:
    np.savez(tmp_path / "b.npz", x=np.ones((2, 3)), y=[0, 1])
    np.savez(tmp_path / "a.npz", x=np.zeros((1, 3)), t=[5.0])
    (tmp_path / "c.npz").write_bytes(b"nothing")
    np.savez(tmp_path / "d.npz", x=np.ones((2, 3)), y=[0])
    np.savez(tmp_path / "e.npz", x=np.array([{"a": 1}], dtype=object))
    readings = list(open_source(f"dir:{tmp_path}"))
    assert [r.y for r in readings[:3]] == [None, 0, 1]
    assert [isinstance(r.x, str) for r in readings] == [False] * 3 + [True] * 3
    assert not list(tmp_path.glob("*.npz")) and len(list((tmp_path / "done").iterdir())) == 5


@pytest.fixture
def port() -> int:
    return free_port()


def served(readings: Iterator[SourceReading], learner: Any, stop: threading.Event) -> None:
    """Answer readings as the command does."""
    for reading in readings:
        if stop.is_set():
            return
        if reading.is_silence:
            continue
        seen = (
            learner.observe(reading.x, reading.y)
            if reading.sample_id is None
            else learner.label(reading.sample_id, reading.y)
        )
        reading.answer({"id": seen.sample_id, "refused": seen.refused, "said": seen.prediction})


def test_a_socket(tmp_path: Path, port: int) -> None:
    readings, stop = open_source(f"socket:127.0.0.1:{port}"), threading.Event()
    learner = learner_in(tmp_path)
    thread = threading.Thread(target=served, args=(readings, learner, stop))
    thread.start()
    try:
        (x, _), (other, _) = blobs(2)
        client = Client(port)
        first = client.ask({"x": x.tolist(), "t": 1})
        assert first == {"id": 1, "refused": "", "said": None}
        assert client.ask({"id": 1, "y": 5})["refused"] == ""
        assert client.ask({"x": other.tolist(), "y": 5})["said"] == 5
        # Tables call it a label.
        assert client.ask({"x": other.tolist(), "label": "cat"})["refused"]
        for bad in (
            "nonsense", "[1]", "5", {"x": [1]}, {"y": 1}, {"x": "a"}, {"x": [[1], 2]},
            {"x": x.tolist(), "y": "cat"}, {"id": "1", "y": 1}, {"id": 99, "y": 1}, {"id": 1},
            "[" * 100_000,
        ):  # fmt: skip
            assert client.ask(bad)["refused"], bad
        # Others are heard beside the first, also one that does not wait for its answer.
        rude = Client(port)
        rude.connection.sendall(json.dumps({"x": x.tolist(), "y": 5}).encode() + b"\n")
        rude.answers.close()
        rude.connection.close()
        assert Client(port).ask({"x": x.tolist()})["said"] == 5
        assert client.ask({"x": x.tolist()})["said"] == 5
    finally:
        stop.set()
        Client(port).connection.sendall(b"{}\n")
        thread.join(10)
    assert not thread.is_alive() and learner.progress.observed == 5
    closed(learner)


def test_columns_may_be_named_by_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("0,1,2\n0.5,1.5,1\n2.5,3.5,0\n")
    readings = list(open_source(f"csv:{path}"))
    assert [(each.x.tolist(), each.y) for each in readings] == [([0.5, 1.5], 1), ([2.5, 3.5], 0)]


def test_a_folder_of_files_of_one_sample_each_and_of_files_that_are_none(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.ones(3), y=1)
    np.savez(tmp_path / "b.npz", x=np.zeros((2, 3)), y=np.array([[0], [1]]))
    np.savez(tmp_path / "c.npz", data=np.ones((2, 3)), labels=[0, 1])
    (tmp_path / "d.npz").write_bytes(b"\x80\x04K\x01.")
    np.save(tmp_path / "e.npy", np.ones((2, 3)))
    (tmp_path / "e.npy").rename(tmp_path / "e.npz")
    readings = list(open_source(f"dir:{tmp_path}"))
    assert [each.x.tolist() for each in readings[:3]] == [[1.0] * 3, [0.0] * 3, [0.0] * 3]
    assert [checked_label(each.y) for each in readings[:3]] == [1, 0, 1]
    assert [str(each.x) for each in readings[3:]] == [
        "c.npz: no array x, only data, labels", "d.npz: no .npz file", "e.npz: no .npz file",
    ]  # fmt: skip


def test_numbers_of_another_byte_order_are_the_same_numbers(tmp_path: Path) -> None:
    stream = blobs(20)
    x, y = np.stack([x for x, _ in stream]), np.array([y for _, y in stream])
    (tmp_path / "in").mkdir()
    np.savez(tmp_path / "in" / "far.npz", x=x.astype(">f4"), y=y.astype(">i8"))
    np.savez(tmp_path / "in" / "near.npz", x=x.astype("<f4"), y=y.astype("<i8"))
    learner = learner_in(tmp_path)
    for reading in open_source(f"dir:{tmp_path / 'in'}"):
        assert learner.observe(reading.x, reading.y).refused == ""
    found = learner.store.take(learner.store.ids().tolist())
    assert {each.tobytes() for each in found.x} <= {each.tobytes() for each in x}
    closed(learner)


def test_a_file_that_is_being_written_under_a_hidden_name_is_left_alone(tmp_path: Path) -> None:
    place = tmp_path / "in"
    place.mkdir()
    np.savez(place / "whole.npz", x=np.ones((1, 2)), y=np.ones(1))
    half = (place / "whole.npz").read_bytes()[:100]
    (place / ".next.npz").write_bytes(half)
    assert len(list(open_source(f"dir:{place}"))) == 1
    assert (place / ".next.npz").read_bytes() == half
