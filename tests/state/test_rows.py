"""Rows against a dictionary, over reopening; what does not fit or was changed is not there."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from damage import flipped

from fl_elastic.state.rows import Rows, delete, page_for, room_of


def opened(path: Path | None, subject: bytes = b"one", most: int = 2**22) -> Rows:
    return Rows(path, subject, most=most)


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_random_lives_are_those_of_a_dictionary(seed: int, on_disk: bool, tmp_path: Path) -> None:
    draw, path = random.Random(seed), tmp_path / "deep" / "rows.db" if on_disk else None
    known: dict[bytes, bytes] = {}
    rows = opened(path)
    for _ in range(60):
        action = draw.choice(["add", "add", "remove", "reopen"])
        if action == "add":
            new = [draw.randbytes(draw.choice([1, 16])) for _ in range(draw.randrange(6))]
            some = {key: draw.randbytes(draw.randrange(9000)) for key in new if key not in known}
            rows.add([*some.items()])
            known |= some
        elif action == "remove" and known:
            gone = draw.sample([*known], draw.randrange(len(known) + 1))
            rows.remove([*gone, b"never there"])
            known = {key: data for key, data in known.items() if key not in gone}
        elif action == "reopen" and on_disk:
            rows.close()
            assert not (tmp_path / "deep" / "rows.db-journal").exists()
            rows = opened(path)
        assert [*rows.places] == [*known]
        asked = [*known, b"unknown"]
        draw.shuffle(asked)
        assert rows.read(asked) == [known.get(key) for key in asked]
    rows.close()


def test_rows_beyond_the_bound_are_refused_as_on_a_full_disk_and_nothing_is_lost(
    tmp_path: Path,
) -> None:
    rows = opened(tmp_path / "rows.db", most=100_000)
    count = 0
    with pytest.raises(OSError, match="No space left"):
        for count in range(1000):
            rows.add([(b"%d" % count, bytes(5000))])
    assert 100_000 // room_of(5000) <= count < 40
    assert (tmp_path / "rows.db").stat().st_size <= 100_000 + 8 * 4096
    assert [*rows.places] == [b"%d" % each for each in range(count)]
    rows.remove([b"0", b"1"])
    rows.add([(b"new", bytes(5000))])
    rows.close()
    again = opened(tmp_path / "rows.db", most=100_000)
    assert again.read([b"new", b"0", b"2"]) == [bytes(5000), None, bytes(5000)]
    again.close()


@pytest.mark.parametrize("size", [10, 300, 1300, 2000, 4000, 4100, 8200, 9000, 30_000])
def test_as_many_rows_fit_as_their_room_says(size: int, tmp_path: Path) -> None:
    page = page_for(size)
    most = 400 * room_of(size, page)
    rows = Rows(tmp_path / "rows.db", b"one", most=most, page=page)
    for place in range(20):
        rows.add([(bytes([place, each]) + bytes(14), bytes(size)) for each in range(20)])
    rows.close()
    # And not many more: a room is no more than half as much again as its row.
    assert room_of(size, page) <= 1.5 * (size + 100)


def test_another_subject_and_too_large_a_file_start_anew(tmp_path: Path) -> None:
    path = tmp_path / "rows.db"
    for subject, most in ((b"two", 2**22), (b"one", 10_000)):
        rows = opened(path)
        rows.add([(b"%d" % each, bytes(1000)) for each in range(100)])
        rows.close()
        rows = opened(path, subject, most)
        assert not rows.places and path.stat().st_size < 20_000
        rows.close()
        delete(path)


def test_a_file_that_is_held_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.db"
    first = opened(path)
    first.add([(b"a", b"data")])
    with pytest.raises(BlockingIOError):
        opened(path)
    with pytest.raises(BlockingIOError):
        opened(path, b"two")
    first.close()
    again = opened(path)
    assert again.read([b"a"]) == [b"data"]
    again.close()


def test_any_bit_of_the_header_may_flip(tmp_path: Path) -> None:
    path = tmp_path / "rows.db"
    rows = opened(path)
    rows.add([(b"a", b"data")])
    rows.close()
    whole = path.read_bytes()
    for bit in range(100 * 8):
        path.write_bytes(flipped(whole, bit))
        rows = opened(path)
        assert rows.read([b"a"]) in ([b"data"], [None])
        # Whatever it was, it takes rows again.
        rows.add([(b"new", b"more")])
        assert rows.read([b"new"]) == [b"more"]
        rows.close()
        path.unlink()


def test_a_file_that_is_not_ours_is_replaced_and_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.db").write_bytes(b"something else " * 100)
    rows = opened(tmp_path / "rows.db")
    rows.add([(b"a", b"data")])
    rows.close()
    assert (tmp_path / "rows.db").stat().st_mode & 0o077 == 0
    with pytest.raises(OSError):
        opened(tmp_path)
