"""The stream service of the examples: killed, started again, and no row lost or learned twice."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from example_copies import copied, environment, ran

from fl_elastic.streaming import SampleStore
from fl_elastic.streaming.learner_state import load_state


@pytest.mark.parametrize("rows", [200, pytest.param(1200, marks=pytest.mark.slow)])
def test_a_killed_service_goes_on(rows: int, tmp_path: Path) -> None:
    place = copied("stream_service", tmp_path)
    said = ran(place, "./run.sh", str(rows))
    assert "killed without warning" in said and "stopped in good order" in said
    assert f"rows that were observed: {rows}\n" in said
    assert json.loads((place / "state" / "summary.json").read_text())["observed"] == rows
    # What is held out to test on and what is stored are together every row, each under its own number.
    state = load_state(place / "state" / "learner.state")
    assert state is not None
    held = [row.number for row in state.recent.held_out]
    with SampleStore(place / "state" / "samples.db", 2**26) as store:
        assert sorted([*store.sample(10**6).ids.tolist(), *held]) == list(range(1, rows + 1))


@pytest.mark.slow
def test_the_check_finds_a_row_that_was_not_learned(tmp_path: Path) -> None:
    place = copied("stream_service", tmp_path)
    ran(place, "python", "producer.py", "readings.csv", "--rows", "60", "--pause", "0")
    ran(
        place, "fl-elastic", "stream", "--source", "csv:readings.csv", "--state-dir", "state",
        "--model", "stream_model:network", "--input", "4",
    )  # fmt: skip
    assert "rows that were observed: 60\n" in ran(
        place, "python", "check.py", "readings.csv", "state"
    )
    # The sensor goes on behind its last row.
    ran(place, "python", "producer.py", "readings.csv", "--rows", "61", "--pause", "0")
    assert len((place / "readings.csv").read_text().splitlines()) == 62
    ended = subprocess.run(
        ["python", "check.py", "readings.csv", "state"], cwd=place, env=environment(),
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 1 and "rows were lost" in ended.stderr
