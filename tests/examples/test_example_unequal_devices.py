"""Flower's quickstart on unequal devices: the difference, and all three apps by Flower's own command."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from example_copies import blocks
from example_runs import Run, difference, runs

EXAMPLE = "unequal_devices"
SLOW = {"pi_3b_plus", "pi_zero_2_w"}


def test_the_difference_in_the_readme_is_the_real_one() -> None:
    assert blocks(EXAMPLE, "diff") == [difference(EXAMPLE, "pytorch", "plain", "unequal")]


def test_the_apps_differ_in_nothing_else() -> None:
    """Model and data of the elastic app are the others', without a loop of its own."""
    lines = difference(EXAMPLE, "pytorch", "plain", "elastic").split("--- ")
    (task,) = [text for text in lines if "task.py" in text.split("\n")[0]]
    added = [line for line in task.splitlines() if line.startswith("+") and "++" not in line]
    assert added == ['+"""The model, the data, and how one is tested on the other."""']


@pytest.fixture
def flwr_run(tmp_path: Path) -> Iterator[Run]:
    """Runs an app as the README says, and returns what its server printed."""
    with runs(EXAMPLE, tmp_path) as run:
        yield run


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as lines:
        return list(csv.DictReader(lines))


def ended(said: str) -> list[tuple[float, float]]:
    """Accuracy and simulated second after each round."""
    found = re.findall(r"accuracy ([\d.]+), second ([\d.]+)", said)
    return [(float(accuracy), float(second)) for accuracy, second in found]


@pytest.mark.deploy
@pytest.mark.slow
def test_all_apps_run_on_flowers_own_runtime(flwr_run: Run, tmp_path: Path) -> None:
    flwr_run("plain", "--run-config", "num-server-rounds=1")

    waiting = tmp_path / "waiting.csv"
    times = ended(flwr_run("unequal", "--run-config", f"rows='{waiting}'"))
    assert len(times) == 11 and times[-1][0] > 0.9
    rows = rows_of(waiting)
    assert Counter(row["outcome"] for row in rows) == {"answered": 100}
    for number in range(1, 11):
        ends = [float(row["arrival"]) for row in rows if row["server_round"] == str(number)]
        assert times[number][1] == pytest.approx(max(ends), abs=0.01)

    # So long that only what a process loads at first could make a fast one late.
    limited = tmp_path / "deadline.csv"
    times = ended(flwr_run("unequal", "--run-config", f"timeout=1.0 rows='{limited}'"))
    assert [second for _, second in times] == pytest.approx(range(11), abs=0.01)
    late = [row for row in rows_of(limited) if row["outcome"] == "late"]
    assert Counter(row["device"] for row in late)["pi_zero_2_w"] == 20

    elastic = tmp_path / "elastic.csv"
    times = ended(flwr_run("elastic", "--run-config", f"rows='{elastic}'"))
    assert times[-1][0] > 0.8
    sent = Counter[str]()
    for row in rows_of(elastic):
        sent[row["device"]] += int(float(row["uplink_bytes"]))
    assert sent["pi_zero_2_w"] < 0.9 * sent["laptop"]
