"""A real fleet whose nodes learn from streams: services and rounds, all processes of their own, meet on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from real_processes import wait_until
from watched_fleet import WatchedFleet

from fl_elastic.monitoring.journal import read_journal
from fl_elastic.streaming.learner_state import load_state
from fl_elastic_simulations.data.datasets import Dataset, load_dataset

pytestmark = [pytest.mark.deploy, pytest.mark.slow]

COMMAND = str(Path(sys.executable).with_name("fl-elastic"))
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1"}
QUIET |= {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "TERM": "dumb"}
ROUNDS, BEFORE, LATER = 3, 300, 100
SCENARIO = f"""
title = "Digits that come as streams"
seeds = [0]
methods = ["elastic"]
[data]
dataset = "digits"
train_limit = 400
[model]
name = "digits_cnn"
[training]
rounds = {ROUNDS}
local_epochs = 1
batch_size = 16
learning_rate = 0.03
[[fleet]]
device = "pi_5"
count = 2
speedup = 2.0
"""


def as_file(folder: Path, name: str, data: Dataset, rows: slice) -> None:
    """A file that is there whole or not."""
    np.savez(folder / f"{name}.part", x=data.train_x[rows], y=data.train_y[rows])
    (folder / f"{name}.part.npz").rename(folder / f"{name}.npz")


def as_rows(table: Path, data: Dataset, rows: slice) -> None:
    """Lines of a table; the first ones with names."""
    flat = data.train_x[rows].reshape(-1, 64)
    lines = [
        ",".join(f"{v:.4f}" for v in x) + f",{y}\n"
        for x, y in zip(flat, data.train_y[rows], strict=True)
    ]
    if not table.exists():
        lines = [",".join(f"x{n}" for n in range(64)) + ",label\n", *lines]
    with table.open("a") as file:
        file.write("".join(lines))


def service(state: Path, source: str) -> subprocess.Popen[str]:
    command = [
        COMMAND, "stream", "--source", source, "--follow", "--json", "--model", "digits_cnn",
        "--input", "1,8,8", "--outputs", "10", "--state-dir", str(state), "--policy", "full",
        "--every", "50", "--steps", "10", "--detector", "none",
    ]  # fmt: skip
    return subprocess.Popen(
        command, env=os.environ | QUIET, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_services_learn_from_their_streams_and_from_the_rounds_of_the_fleet(tmp_path: Path) -> None:
    data = load_dataset("digits")
    arriving, table = tmp_path / "arriving", tmp_path / "table.csv"
    arriving.mkdir()
    as_file(arriving, "a", data, slice(0, BEFORE))
    as_rows(table, data, slice(BEFORE, 2 * BEFORE))
    (tmp_path / "scenario.toml").write_text(SCENARIO)
    states = [tmp_path / "stream0", tmp_path / "stream1"]
    services = [service(states[0], f"dir:{arriving}"), service(states[1], f"csv:{table}")]

    def observed(state: Path) -> int:
        saved = load_state(state / "learner.state")
        return 0 if saved is None else saved.progress.observed

    def all_taken() -> bool:
        return all(not any((state / "inbox").iterdir()) for state in states)

    try:
        assert wait_until(lambda: all(observed(each) == BEFORE for each in states), 120)
        config = [{"stream-state-dir": str(state)} for state in states]
        with WatchedFleet(
            2, tmp_path / "fleet", config={"threads": 1, "joining": "measured"},
            node_config=config, environment=QUIET,
        ) as fleet:  # fmt: skip
            submitted = subprocess.run(
                [COMMAND, "fleet", "submit", str(fleet.folder.root), "--json", "--scenario",
                 str(tmp_path / "scenario.toml")],
                env=os.environ | QUIET, capture_output=True, text=True, timeout=400,
            )  # fmt: skip
            assert submitted.returncode == 0, submitted.stderr
            assert json.loads(submitted.stdout)["status"] == "finished:completed"
            rounds = read_journal(fleet.folder.rounds)
            journals = [
                read_journal(fleet.folder.root / "state" / name / "metrics.jsonl")
                for name in fleet.names
            ]
        assert [line["round"] for line in rounds] == list(range(ROUNDS + 1))
        assert all(line["accepted"] == 2 for line in rounds[1:])
        # What the streams taught reaches the federation's model.
        assert rounds[-1]["accuracy"] > rounds[0]["accuracy"] + 0.3
        for lines in journals:
            assert [line["samples_since_round"] for line in lines] == [BEFORE, 0, 0]
            assert all(line["store_bytes"] > 10_000 for line in lines)
            assert all(0 <= line["joined_share"] <= 1 for line in lines)
        # They look into their inbox also while nothing comes.
        assert wait_until(all_taken, 120)
        as_file(arriving, "b", data, slice(2 * BEFORE, 2 * BEFORE + LATER))
        as_rows(table, data, slice(2 * BEFORE + LATER, 2 * BEFORE + 2 * LATER))
        assert wait_until(lambda: all(observed(each) == BEFORE + LATER for each in states), 120)
        for each in services:
            each.terminate()
        summaries = [json.loads(each.communicate(timeout=60)[0]) for each in services]
    finally:
        for each in services:
            each.kill()
            each.wait()
    for state, summary in zip(states, summaries, strict=True):
        assert summary["observed"] == BEFORE + LATER and summary["refused"] == {}
        assert summary["prequential_accuracy"] > 0.5
        saved = load_state(state / "learner.state")
        assert saved is not None
        # A round that ends before the one before it was looked at takes its place.
        assert 1 <= saved.rounds.taken <= ROUNDS
