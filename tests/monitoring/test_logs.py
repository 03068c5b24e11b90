"""Logs are lines of JSON in files of bounded size."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from fl_elastic.monitoring.journal import log_to_file


def test_every_record_is_one_json_line_whatever_it_says(tmp_path: Path) -> None:
    path = tmp_path / "made" / "node.log"
    log_to_file(path)
    log_to_file(path)
    log = logging.getLogger("fl_elastic")
    log.info('two\nlines and "quotes" of node %s', 7)
    try:
        raise ValueError("wrong")
    except ValueError:
        log.exception("it failed")
    logging.getLogger("flwr").warning("from below")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["level"] for line in lines] == ["INFO", "ERROR", "WARNING"]
    assert lines[0]["message"] == 'two\nlines and "quotes" of node 7'
    assert "ValueError: wrong" in lines[1]["error"]


def test_files_stay_bounded(tmp_path: Path) -> None:
    path = tmp_path / "node.log"
    log_to_file(path, max_bytes=2000)
    for number in range(500):
        logging.getLogger("fl_elastic").info("line %s", number)
    sizes = {each.name: each.stat().st_size for each in tmp_path.iterdir()}
    assert set(sizes) == {"node.log", "node.log.1", "node.log.2", "node.log.3"}
    assert max(sizes.values()) <= 2000


@pytest.mark.parametrize("path", ["/dev/full", "/proc/no/such/place.log"])
def test_a_log_that_cannot_be_written_ends_nothing(
    path: str, capfd: pytest.CaptureFixture[str]
) -> None:
    log_to_file(path)
    logging.getLogger("fl_elastic").info("still here")
    assert "Traceback" not in capfd.readouterr().err
