"""Sources that are changed, damaged or hostile: each costs itself alone, or one clear error."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import socket
import threading
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from line_client import Client
from toy_streams import blobs, closed, learner_in

from fl_elastic.errors import StreamDataError, StreamError
from fl_elastic.streaming import StreamLearner
from fl_elastic.streaming.sources import LONGEST_LINE, SourcePosition, SourceReading, open_source


def numbers(readings: Iterator[SourceReading], count: int) -> list[float]:
    """The first number of each of the next rows; silence is passed over, but not for ever."""
    found: list[float] = []
    for reading in islice(readings, count + 50):
        if not reading.is_silence:
            found.append(float(reading.x[0]))
        if len(found) == count:
            break
    return found


def until_silence(readings: Iterator[SourceReading]) -> list[float]:
    found = []
    for reading in readings:
        if reading.is_silence:
            return found
        found.append(float(reading.x[0]))
    return found


def table(path: Path, first: int, count: int, mode: str = "w") -> None:
    with open(path, mode) as stream:
        if mode == "w":
            stream.write("a,label\n")
        stream.writelines(f"{i},{i % 2}\n" for i in range(first, first + count))


@pytest.mark.parametrize("rows", [3, 60], ids=["shorter", "grown again"])
def test_a_table_that_is_cut_off_while_it_is_followed_is_refused(tmp_path: Path, rows: int) -> None:
    path = tmp_path / "t.csv"
    table(path, 0, 20)
    readings = open_source(f"csv:{path}", follow=True)
    assert until_silence(readings) == list(range(20))
    table(path, 50, rows)
    with pytest.raises(StreamError, match=r"t\.csv was cut off or changed before byte.*20 rows"):
        numbers(readings, 3)


def test_a_table_that_is_rotated_is_read_to_its_end_and_the_new_one_after_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "t.csv"
    table(path, 0, 5)
    readings = open_source(f"csv:{path}", follow=True)
    assert until_silence(readings) == list(range(5))
    table(path, 5, 2, "a")
    path.rename(tmp_path / "t.csv.1")
    assert until_silence(readings) == [5, 6]
    table(path, 100, 3)
    assert numbers(readings, 3) == [100, 101, 102]
    # Written anew with all its rows, as by a program that saves its table: only new ones are new.
    table(tmp_path / "whole", 100, 5)
    (tmp_path / "whole").rename(path)
    assert numbers(readings, 2) == [103, 104]


def place_after(path: Path, rows: int) -> dict[str, Any]:
    position = list(open_source(f"csv:{path}"))[rows - 1].position
    assert position is not None
    return json.loads(json.dumps(position))  # type: ignore[no-any-return]


@pytest.mark.parametrize("change", ["shorter", "empty", "other rows", "other header"])
@pytest.mark.parametrize("follow", [False, True])
def test_a_table_that_is_another_one_after_a_restart_is_refused(
    follow: bool, change: str, tmp_path: Path
) -> None:
    path = tmp_path / "t.csv"
    table(path, 0, 20)
    after = place_after(path, 10)
    if change == "shorter":
        table(path, 0, 9)
    elif change == "empty":
        path.write_text("")
    elif change == "other rows":
        table(path, 100, 50)
    else:
        path.write_text("b" + path.read_text()[1:])
    with pytest.raises(StreamError, match=r"not as it was when 10 rows.*--state-dir"):
        list(islice(open_source(f"csv:{path}", after=after, follow=follow), 30))


def test_a_table_goes_on_where_it_was_also_when_it_has_grown_or_was_copied(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    table(path, 0, 20)
    after = place_after(path, 10)
    table(path, 20, 5, "a")
    assert [float(r.x[0]) for r in open_source(f"csv:{path}", after=after)] == list(range(10, 25))
    (tmp_path / "copy").write_bytes(path.read_bytes())
    os.replace(tmp_path / "copy", path)
    assert [float(r.x[0]) for r in open_source(f"csv:{path}", after=after)] == list(range(10, 25))


def test_a_table_that_was_rotated_while_nobody_read(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    table(path, 0, 20)
    after = place_after(path, 18)
    path.rename(tmp_path / "t.csv.1")
    table(path, 100, 2)
    with pytest.raises(StreamError, match="not as it was"):
        list(open_source(f"csv:{path}", after=after))
    readings = open_source(f"csv:{path}", after=after, follow=True)
    assert numbers(readings, 4) == [18, 19, 100, 101]
    (tmp_path / "t.csv.1").unlink()
    assert numbers(open_source(f"csv:{path}", after=after, follow=True), 2) == [100, 101]


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("rotated", [False, True])
def test_a_table_that_goes_on_with_other_columns_is_refused(
    rotated: bool, restarted: bool, tmp_path: Path
) -> None:
    path, rows = tmp_path / "t.csv", "".join(f"{i},100,{i % 2}\n" for i in range(60))
    path.write_text(f"a,b,label\n{rows}")
    after = place_after(path, 40) if restarted else None
    readings = open_source(f"csv:{path}", after=after, follow=True)
    if not restarted:
        assert until_silence(readings) == list(range(60))
    if rotated:
        path.rename(tmp_path / "t.csv.1")
        path.write_text("time,a,label,b\n5,60,0,100\n")
        # What is ignored and what is the label may stand anywhere.
        assert numbers(readings, 1 + 20 * restarted)[-1] == 60
        path.rename(tmp_path / "t.csv.2")
        path.write_text("b,a,label\n100,61,1\n")
    else:
        # As an editor saves it: the rows before the position are the same, but for the header.
        (tmp_path / "new").write_text(f"b,a,label\n{rows}60,100,0\n")
        (tmp_path / "new").rename(path)
    with pytest.raises(StreamDataError, match=r"begins with 'b, a, label', other columns"):
        numbers(readings, 30)


def test_a_file_that_is_packed_in_an_unknown_way_costs_itself_alone(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.ones((2, 3)), y=[0, 1])
    data = bytearray((tmp_path / "a.npz").read_bytes())
    for signature, offset in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        place = 0
        while (place := data.find(signature, place)) >= 0:
            data[place + offset] = 99
            place += 4
    (tmp_path / "a.npz").write_bytes(bytes(data))
    np.savez(tmp_path / "b.npz", x=np.zeros((1, 3)), y=[1])
    readings = list(open_source(f"dir:{tmp_path}"))
    assert "compression" in readings[0].x and readings[1].x.tolist() == [0, 0, 0]
    assert not list(tmp_path.glob("*.npz"))


def test_what_a_source_cannot_read_is_refused_with_the_reason(tmp_path: Path) -> None:
    learner = learner_in(tmp_path)
    long = "1" * (LONGEST_LINE + 10)
    (tmp_path / "t.csv").write_text(f"a,b,time,label\n1,2,3\n1,n/a,3,0\n{long}\n1,2,monday,cat\n")
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.npz").write_bytes(b"PK")
    np.savez(tmp_path / "in/b.npz", x=np.ones((2, 6)), y=[0])
    for spec in (f"csv:{tmp_path}/t.csv", f"dir:{tmp_path}/in"):
        for reading in open_source(spec):
            handled(learner, reading)
    assert not learner.progress.observed
    reasons = list(learner.progress.rejected)
    assert reasons[:4] == [
        "3 fields instead of 4",
        "'n/a' in column 'b' is not a number",
        f"line too long: more than {LONGEST_LINE} bytes",
        "the label 'cat' is not a class number: number the classes",
    ]
    assert reasons[4].startswith("a.npz: ") and reasons[5] == "b.npz: 2 samples, 1 labels"
    closed(learner)


def mutated(data: bytes, draw: random.Random) -> bytes:
    """The same, with bytes changed, cut out or put in."""
    found = bytearray(data)
    for _ in range(draw.randrange(1, 6)):
        place = draw.randrange(len(found) + 1)
        kind = draw.randrange(4)
        if kind == 0 and place < len(found):
            found[place] = draw.randrange(256)
        elif kind == 1:
            del found[place : place + draw.randrange(1, 9)]
        elif kind == 2:
            found[place:place] = draw.randbytes(draw.randrange(1, 5))
        else:
            odd = [
                b"1e999",
                b"-",
                b'"',
                b"\0",
                b"\r",
                b"nan",
                b"[" * 50,
                b"9" * 5000,
                b"{}",
                b"null",
            ]
            found[place:place] = draw.choice(odd)
    return bytes(found)


def handled(learner: StreamLearner, reading: SourceReading) -> dict[str, Any]:
    """What the command does with a reading."""
    if reading.sample_id is not None:
        seen = learner.label(reading.sample_id, reading.y)
    else:
        names = [reading.name]
        seen = learner.observe_batch([reading.x], [reading.y], names=names)[0]
    said = asdict(seen)
    reading.answer(said)
    return said


@pytest.mark.parametrize("kind", ["csv", "dir"])
def test_changed_files_cost_rows_and_not_the_service(kind: str, tmp_path: Path) -> None:
    draw, stream = random.Random(kind), blobs(4)
    learner = learner_in(tmp_path)
    x, y = np.stack([x for x, _ in stream]), [y for _, y in stream]
    np.savez(tmp_path / "good", x=x, y=y, t=np.arange(4.0))
    rows = "".join(f"{','.join(map(str, each))},{label}\n" for each, label in stream)
    plain = {
        "csv": f"a,b,c,d,e,f,label\n{rows}".encode(), "dir": (tmp_path / "good.npz").read_bytes()
    }  # fmt: skip
    place = tmp_path / "in"
    place.mkdir()
    for _ in range(300):
        path = place / f"some.{'csv' if kind == 'csv' else 'npz'}"
        path.write_bytes(mutated(plain[kind], draw))
        spec = f"csv:{path}" if kind == "csv" else f"dir:{place}"
        for reading in open_source(spec):
            handled(learner, reading)
    progress = learner.progress
    # Hardly a byte of an archive can be another one.
    assert progress.observed > (100 if kind == "csv" else 3)
    assert sum(progress.rejected.values()) > 100
    assert learner.observe(*stream[0]).refused == ""
    closed(learner)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[int]:
    """The port of a service whose learner goes through whatever comes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    learner, stop, failed = learner_in(tmp_path), threading.Event(), list[BaseException]()
    readings = open_source(f"socket:127.0.0.1:{port}")

    def serve() -> None:
        try:
            for reading in readings:
                if stop.is_set():
                    return
                if not reading.is_silence:
                    handled(learner, reading)
        except BaseException as error:
            failed.append(error)
            raise

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield port
    stop.set()
    thread.join(60)
    assert not failed and not thread.is_alive()
    closed(learner)


def test_lines_of_any_kind_are_answered(service: int) -> None:
    client, x = Client(service), blobs(1)[0][0].tolist()
    assert client.ask({"x": x, "y": 0})["sample_id"] == 1
    for odd in (
        {"id": 2**70, "y": 0}, {"id": -(2**70), "y": 0}, {"id": 2**63, "y": 0}, {"id": 0, "y": 0},
        {"id": -5, "y": 0}, {"id": True, "y": 0}, {"id": 1.5, "y": 0}, {"id": [1], "y": 0},
        {"id": "", "y": 0}, {"id": "a" * 1000, "x": x}, {"id": "never heard of", "y": 0},
        {"x": x, "y": 2**70}, {"x": x, "y": -(2**70)}, {"x": [2**2000]},
        {"x": {"a": 1}}, {"x": "1"}, {"x": [[[[x]]]]}, {"x": [None]}, {"x": x, "y": [1]},
        {"x": x, "y": {}},
        b"[" * 200_000, b'{"x":' + b"[" * 900 + b"]" * 900 + b"}", b"\xff\xfe\x00", b'{"x": NaN}',
        b"1" * 10_000, b'{"id": ' + b"1" * 10_000 + b"}",
    ):  # fmt: skip
        assert client.ask(odd)["refused"], odd
    assert client.ask({"x": x, "y": 0})["sample_id"] == 2
    for odd, why in (
        (b"5", "no JSON object"), (b"{", "no JSON object"), ({"y": 1}, "no x in it"),
        ({"x": "1"}, "shape () instead of (6,)"), ({"x": ["a"]}, "x is not an array of numbers"),
        ({"x": x, "y": "cat"}, "the label 'cat' is not a class number: number the classes"),
        ({"id": 1}, "there is no label: give the class number of the sample"),
        ({"id": 1.0, "y": 0}, "the id is no whole number and no short name"),
        ({"id": "a" * 1000, "x": x}, "the id is no whole number and no short name"),
    ):  # fmt: skip
        assert client.ask(odd)["refused"] == why
    client.close()


def test_mutated_lines_are_answered(service: int) -> None:
    client, draw = Client(service), random.Random(0)
    x = blobs(1)[0][0].round(3).tolist()
    assert client.ask({"x": x, "y": 0})["refused"] == ""
    lines = [
        {"x": x, "y": 1, "t": 3.5},
        {"id": 1, "y": 2},
        {"id": "me", "x": x},
        {"id": "me", "y": 0},
    ]
    for _ in range(2000):
        line = mutated(json.dumps(draw.choice(lines)).encode(), draw).replace(b"\n", b" ")
        if line.strip():
            assert "refused" in client.ask(line), line
    assert client.ask({"x": x, "y": 0})["refused"] == ""
    client.close()


def test_a_line_that_never_ends_is_refused(service: int) -> None:
    rude = Client(service)
    part = b"1" * 2**20
    for _ in range(16):
        rude.connection.sendall(part)
    assert rude.ask(b"1" * 100)["refused"] == f"line too long: more than {LONGEST_LINE} bytes"
    polite = Client(service)
    assert polite.ask({"x": blobs(1)[0][0].tolist(), "y": 0})["refused"] == ""
    polite.close()
    rude.close()


def test_many_lines_that_never_end_take_bounded_memory(service: int) -> None:
    part, rude = b"1" * 2**20, [Client(service) for _ in range(6)]
    for _ in range(15):
        for each in rude:
            with contextlib.suppress(OSError):
                each.connection.sendall(part)
    polite = Client(service)
    assert polite.ask({"x": blobs(1)[0][0].tolist(), "y": 0})["refused"] == ""
    # 90 MiB are more than all may take together: the longest were sent away.
    readable, _, _ = select.select([each.connection for each in rude], [], [], 60)
    assert readable
    for each in (*rude, polite):
        each.close()


def test_one_who_reads_no_answers_keeps_nobody_from_theirs(service: int) -> None:
    rude = socket.socket()
    rude.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    rude.connect(("127.0.0.1", service))
    rude.settimeout(1.0)
    with pytest.raises(TimeoutError):
        # It is not listened to any more once enough of its answers are unread.
        while True:
            rude.sendall(b"5\n" * 10_000)
    polite = Client(service)
    for _ in range(20):
        assert polite.ask({"x": blobs(1)[0][0].tolist(), "y": 0})["refused"] == ""
    polite.close()
    rude.close()


def test_what_is_sent_again_counts_once(service: int) -> None:
    client, x = Client(service), blobs(1)[0][0].tolist()
    first = client.ask({"id": "door-1", "x": x})
    again = client.ask({"id": "door-1", "x": x})
    assert first["sample_id"] == again["sample_id"] == 1
    assert (first["again"], again["again"], again["refused"]) == (False, True, "")
    assert client.ask({"id": 17, "x": x, "y": 1})["sample_id"] == 2
    assert client.ask({"id": 17, "x": x, "y": 1})["again"]
    # Its sender's name does for a label, too.
    assert client.ask({"id": "door-1", "y": 2}) | {"prediction": None} == {
        "prediction": None, "correct": False, "drift": False, "adapted": False,
        "rolled_back": False, "sample_id": 1, "again": False, "refused": "",
    }  # fmt: skip
    assert client.ask({"x": x})["sample_id"] == 3
    client.close()


def test_a_label_for_a_number_of_the_senders_own_goes_to_no_other_sample(service: int) -> None:
    client, x = Client(service), blobs(1)[0][0].tolist()
    assert client.ask({"id": 2, "x": x})["sample_id"] == 1
    assert client.ask({"id": 1, "x": x})["sample_id"] == 2
    # Its sender means its second sample, and the sample_id 1 is that of its first.
    assert "give their own ids as text" in client.ask({"id": 1, "y": 1})["refused"]
    assert client.ask({"id": "1", "y": 1})["sample_id"] == 2
    client.close()


def test_that_senders_use_numbers_of_their_own_is_known_after_a_restart(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        spec = f"socket:127.0.0.1:{free.getsockname()[1]}"

    def heard(line: bytes) -> SourceReading:
        readings = open_source(spec, after=learner.positions.get(spec))
        next(readings)
        with socket.create_connection(("127.0.0.1", int(spec.rpartition(":")[2]))) as sender:
            sender.sendall(line)
            found = next(each for each in islice(readings, 50) if not each.is_silence)
        readings.close()
        return found

    learner = learner_in(tmp_path)
    x = blobs(1)[0][0]
    reading = heard(json.dumps({"id": 2, "x": x.tolist()}).encode() + b"\n")
    assert reading.position is not None
    position = SourcePosition(spec, reading.position)
    learner.observe_batch([x], None, names=[reading.name], position=position)
    closed(learner)
    learner = learner_in(tmp_path)
    assert "give their own ids as text" in heard(b'{"id": 1, "y": 1}\n').x
    closed(learner)
