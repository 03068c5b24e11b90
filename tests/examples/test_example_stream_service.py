"""The stream service of the examples: killed, started again, and no row lost or learned twice."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from command_line import call
from example_copies import copied, ran

from fl_elastic.streaming import SampleStore
from fl_elastic.streaming.learner_state import load_state


@pytest.mark.slow  # Services are killed in `test_service_killed.py` each time.
def test_a_killed_service_goes_on(tmp_path: Path) -> None:
    rows = 1200
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


def test_the_check_finds_a_row_that_was_not_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(copied("stream_service", tmp_path))
    monkeypatch.syspath_prepend(".")

    def script(*command: str) -> None:
        monkeypatch.setattr("sys.argv", [*command])
        runpy.run_path(command[0], run_name="__main__")

    script("producer.py", "readings.csv", "--rows", "60", "--pause", "0")
    learned = call(
        monkeypatch, capsys, "stream", "--source", "csv:readings.csv", "--state-dir", "state",
        "--model", "stream_model:network", "--input", "4",
    )  # fmt: skip
    assert learned.status == 0, learned.err
    script("check.py", "readings.csv", "state")
    assert "rows that were observed: 60\n" in capsys.readouterr().out
    # The sensor goes on behind its last row.
    script("producer.py", "readings.csv", "--rows", "61", "--pause", "0")
    assert len(Path("readings.csv").read_text().splitlines()) == 62
    with pytest.raises(SystemExit, match="rows were lost"):
        script("check.py", "readings.csv", "state")
