"""A journal outlasts crashes, full disks and its own growth."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import pytest

from fl_elastic.monitoring import Journal
from fl_elastic.monitoring.journal import read_journal


def test_entries_come_back_in_order_from_a_folder_that_was_made(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a" / "rounds.jsonl")
    assert journal.last() is None and read_journal(journal.path) == []
    for number in range(3):
        assert journal.append({"round": number, "nodes": {"pi0": {"steps": 2}}})
    assert [entry["round"] for entry in read_journal(journal.path)] == [0, 1, 2]
    assert journal.last() == {"round": 2, "nodes": {"pi0": {"steps": 2}}}


@pytest.mark.parametrize("cut", range(1, 18))
def test_a_line_that_a_crash_cut_in_two_costs_itself_alone(cut: int, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "rounds.jsonl")
    journal.append({"round": 1})
    whole = journal.path.read_bytes()
    journal.path.write_bytes(whole + json.dumps({"round": 2, "x": 3}).encode()[:cut])
    journal.append({"round": 3})
    rounds = [entry["round"] for entry in read_journal(journal.path)]
    assert rounds == [1, 3] or (cut == 18 and rounds == [1, 2, 3])


def test_garbage_between_lines_is_skipped(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "rounds.jsonl")
    journal.append({"round": 1})
    with journal.path.open("ab") as stream:
        stream.write(b'\x00\xff\n[1, 2]\n"text"\n' + b"[" * 100_000 + b"\n")
    journal.append({"round": 2})
    assert [entry["round"] for entry in read_journal(journal.path)] == [1, 2]


def test_it_starts_anew_when_full_and_keeps_the_file_before(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "rounds.jsonl", max_bytes=200)
    for number in range(50):
        journal.append({"round": number})
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == 2 and max(sizes) <= 200
    assert journal.last() == {"round": 49}
    # Right after a change of files the newest entry is in the old one.
    journal.path.replace(tmp_path / "rounds.jsonl.1")
    assert journal.last() == {"round": 49}


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "rounds.jsonl")
    journal.append({"loss": math.nan, "nodes": {"a": {"x": math.inf}}, "list": [1.0, -math.inf]})
    assert journal.last() == {"loss": None, "nodes": {"a": {"x": None}}, "list": [1.0, None]}


def test_a_full_disk_costs_the_line_and_is_said(caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal("/dev/full")
    with caplog.at_level(logging.WARNING, logger="fl_elastic"):
        assert not journal.append({"round": 1})
    assert "No space left" in caplog.text


def test_entries_are_those_of_both_files(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "rounds.jsonl", max_bytes=100)
    for number in range(15):
        journal.append({"round": number})
    rounds = [entry["round"] for entry in journal.entries()]
    assert rounds == list(range(rounds[0], 15))
    assert len(rounds) > len(read_journal(journal.path))
    journal.remove()
    assert journal.entries() == [] and list(tmp_path.iterdir()) == []
