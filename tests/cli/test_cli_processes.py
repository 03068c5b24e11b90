"""``fl-elastic simulate`` as a user runs it: the demo, Ctrl-C, and going on afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from command_line import call
from processes import alive, below, start
from real_processes import wait_until

pytestmark = pytest.mark.deploy

DEMO = Path(__file__).resolve().parents[2] / "simulations" / "scenarios" / "demo.toml"
METHOD_KEYS = {
    "final_accuracy", "rounds", "simulated_seconds", "seconds_to_target", "uplink_bytes",
    "downlink_bytes", "devices", "coverage",
}  # fmt: skip

# At a speedup of 4 three steps pay for one of the cheapest, and for none where noise makes that dearer.
SCENARIO = """
title = "Three devices"
seeds = [0]
methods = ["full", "elastic"]

[data]
dataset = "digits"
train_limit = 240
test_limit = 100
min_examples = 10

[model]
name = "digits_cnn"

[training]
rounds = 2

[[fleet]]
device = "pi_zero_2_w"
count = 2
speedup = 2.0

[[fleet]]
device = "laptop"
"""


def finished(process: subprocess.Popen[str], seconds: float) -> tuple[str, str]:
    """Output and errors of the command, which must end in time."""
    try:
        return process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise


def check_summary(summary: dict[str, Any], rounds: int) -> None:
    assert list(summary["methods"]) == ["full", "elastic"]
    for found in summary["methods"].values():
        assert set(found) >= METHOD_KEYS
        assert 0 <= found["final_accuracy"] <= 1
        assert found["rounds"] == rounds
        assert found["simulated_seconds"] > 0
        assert found["uplink_bytes"] > 0
        assert found["downlink_bytes"] > 0
        for device in found["devices"].values():
            assert device["requested_speedup"] >= 1
            assert device["achieved_speedup"] > 0
        for by_round in found["coverage"].values():
            assert len(by_round) == rounds
            assert all(0 <= share <= 1 for shares in by_round for share in shares)


@pytest.mark.slow
def test_the_demo_writes_its_summary_and_report(tmp_path: Path) -> None:
    """In one process: those of Flower's engine run below, and take longer."""
    process = start(
        tmp_path, "simulate", DEMO, "--engine", "local",
        "--set", "training.rounds=1", "--set", "training.local_steps=2", "--set", "seeds=0",
        "--output", "out",
        PYTHONPROFILEIMPORTTIME="1",
    )  # fmt: skip
    out, err = finished(process, 240)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert err.count("round 1 of 1") == 2, "every line comes once for each method"
    imported = {line.split("|")[-1].strip() for line in err.splitlines() if "|" in line}
    assert "torch" in imported
    assert not {"torch._dynamo", "flwr.simulation"} & imported, (
        "nothing uses them, and they take seconds"
    )
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    check_summary(summary, rounds=1)
    assert summary["simulated"] is True
    assert summary["clients"] == 10
    assert len(summary["methods"]["elastic"]["devices"]) == 6
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.lstrip().lower().startswith("<!doctype html>")
    assert page.rstrip().endswith("</html>")
    assert "elastic" in out
    assert "summary.json" in out


@pytest.mark.slow  # In one process an interruption is tested in `test_simulated_federation.py` each time.
def test_ctrl_c_keeps_what_is_finished_and_resume_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "three.toml").write_text(SCENARIO)
    arguments = ("simulate", "three.toml", "--output", "out")
    first_cell = tmp_path / "out" / "cells" / "full-0.json"
    process = start(tmp_path, *arguments)
    try:
        assert wait_until(first_cell.exists, 180), "the first method did not finish"
        started = below(process.pid)
        assert len(started) > 3, "the engine runs in processes of its own"
        # A terminal interrupts the whole group.
        os.killpg(process.pid, signal.SIGINT)
        _, err = finished(process, 60)
    finally:
        if process.poll() is None:
            process.kill()
    assert process.returncode == 130
    assert err.splitlines()[-1] == "interrupted; finished parts are kept"
    assert "Traceback" not in err
    assert wait_until(lambda: not alive(started), 20), f"left behind: {alive(started)}"
    names = {path.name for path in (tmp_path / "out").rglob("*") if path.is_file()}
    if "summary.json" in names:
        # It is written after each method that has finished.
        early = json.loads((tmp_path / "out" / "summary.json").read_text())
        assert set(early["methods"]) == {"full"}
    assert not any(name.endswith(".tmp") for name in names)
    kept = first_cell.read_bytes()
    assert len(json.loads(kept)["history"]) == 3

    # A finished method stays what it is.
    monkeypatch.chdir(tmp_path)
    ended = call(monkeypatch, capsys, *arguments, "--engine", "local", "--resume", "--json")
    assert ended.status == 0, ended.err
    assert first_cell.read_bytes() == kept
    summary = json.loads(ended.out)
    check_summary(summary, rounds=2)
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == summary
