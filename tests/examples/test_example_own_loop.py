"""The example of a training loop of one's own, run as its README says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from example_copies import EXAMPLES, copied, ran


@pytest.mark.slow
def test_it_trains_by_a_plan_and_reads_its_update_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", "own_loop.py --epochs 1 --output sent.bin".split())
    runpy.run_path(str(EXAMPLES / "own_loop" / "own_loop.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert (tmp_path / "sent.bin").stat().st_size > 500
    trained = re.findall(r"  trained: (.*)", said)[0].split(", ")
    assert "13.weight" in trained
    assert re.search(r"a step: [\d.]+ ms without plan, [\d.]+ ms by the plan", said)
    assert f"read back: {len(trained)} tensors after" in said
    # What the server makes of the file is the model that was trained.
    by_plan, read_back = re.findall(r"(?:by the plan:|\d+ examples;) accuracy ([\d.]+)", said)
    assert abs(float(by_plan) - float(read_back)) <= 0.02


@pytest.mark.slow
def test_what_no_step_can_keep_is_kept_by_fewer(tmp_path: Path) -> None:
    said = ran(
        copied("own_loop", tmp_path), "python", "own_loop.py", "--epochs", "1", "--speedup", "50"
    )
    taken, whole = map(int, re.findall(r"(\d+) of (\d+) steps", said)[0])
    assert 1 <= taken < whole / 5
