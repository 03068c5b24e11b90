"""``fleet up``: a scenario on real processes of this machine, and nothing left of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from real_processes import wait_until

from fl_elastic.errors import FleetError, ScenarioError
from fl_elastic.fleet.flower_cli import RunState
from fl_elastic.fleet.up import result_of, run_local
from fl_elastic_simulations.fleet.scenario_text import scenario_text
from fl_elastic_simulations.scenario import Scenario

COMMAND = Path(sys.executable).with_name("fl-elastic")
DEMO = Path(__file__).parents[2] / "simulations" / "scenarios" / "demo.toml"


def loaded(path: Path | None, nodes: int, overrides: list[str]) -> Scenario:
    return Scenario.from_json(scenario_text(path, overrides, nodes))


def test_the_digits_come_in_any_number() -> None:
    for count in (1, 5):
        scenario = loaded(None, count, [])
        assert len(scenario.clients) == count and scenario.data.dataset == "digits"
    assert loaded(None, 2, ["training.rounds=7"]).training.rounds == 7


def test_a_scenario_must_fit_the_fleet() -> None:
    assert len(loaded(DEMO, 10, []).clients) == 10
    with pytest.raises(FleetError, match=r"10 clients and the fleet 4 nodes.*--local 10"):
        loaded(DEMO, 4, [])
    with pytest.raises(ScenarioError):
        loaded(None, 4, ["training.rounds=x"])


def test_what_came_out_is_read_from_the_runs_folder(tmp_path: Path) -> None:
    state = RunState("5", "finished:completed", "", 9.0, 100, 200)
    flower = {"flower_bytes_to_server": 100, "flower_bytes_to_nodes": 200}
    assert result_of(tmp_path, state) == {"rounds": 0, **flower}
    summary = {"final_accuracy": 0.7, "rounds": 2, "method": "elastic", "uplink_bytes_total": 5}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    lines = [
        {"round": 0, "accuracy": 0.1},
        {"round": 1, "accuracy": 0.6, "round_seconds": 2},
        {"round": 2, "accuracy": 0.8, "round_seconds": 4.0},
    ]
    (tmp_path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert result_of(tmp_path, state) == {
        "accuracy": 0.8, "final_accuracy": 0.7, "rounds": 2, "method": "elastic",
        "seconds_per_round": 3.0, "uplink_bytes": 5, **flower,
    }  # fmt: skip


def test_an_occupied_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(FleetError, match="not empty"):
        run_local(1, None, [], keep=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def left(word: str) -> dict[int, str]:
    """Command lines of processes that have this word in their environment, by process id."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if word.encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    return found


@pytest.fixture
def mark() -> Iterator[str]:
    """A word for the environment of a test's processes, which end with the test, also where it fails."""
    word = f"up-{os.getpid()}-{time.monotonic_ns()}"
    yield word
    for process in left(word):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def start(mark: str, temporary: Path, *words: object) -> subprocess.Popen[str]:
    temporary.mkdir()
    environment = {
        **os.environ, "MARK": mark, "TMPDIR": str(temporary), "NO_COLOR": "1", "TERM": "dumb",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
    }  # fmt: skip
    return subprocess.Popen(
        [str(COMMAND), "fleet", "up", *map(str, words)], env=environment, text=True,
        start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.deploy
@pytest.mark.slow
def test_digits_are_learned_on_real_processes_and_nothing_stays(tmp_path: Path, mark: str) -> None:
    running = start(
        mark, tmp_path / "tmp", "--local", 2, "--set", "training.rounds=2", "--json",
        "--keep", tmp_path / "kept",
    )  # fmt: skip
    out, err = running.communicate(timeout=400)
    assert running.returncode == 0, err
    result = json.loads(out)
    assert result["status"] == "finished:completed" and result["rounds"] == 2
    assert result["accuracy"] > 0.3  # of ten digits, after two rounds
    assert result["flower_bytes_to_server"] > result["uplink_bytes"] > 0
    assert result["seconds_per_round"] > 0
    assert "round 2, accuracy" in err and "2 nodes are online" in err
    assert not left(mark)
    assert list((tmp_path / "tmp").iterdir()) == []
    rounds = (tmp_path / "kept" / "server" / "results" / "rounds.jsonl").read_text().splitlines()
    assert set(json.loads(rounds[-1])["nodes"]) == {"node0", "node1"}


@pytest.mark.deploy
@pytest.mark.slow
@pytest.mark.parametrize(
    ("numbers", "status"),
    [
        ([signal.SIGINT], 130),
        ([signal.SIGINT, signal.SIGINT], 130),
        ([signal.SIGTERM], 130),
        ([signal.SIGKILL], -9),
    ],
)
def test_nothing_stays_after_an_interruption(
    tmp_path: Path, mark: str, numbers: list[int], status: int
) -> None:
    running = start(mark, tmp_path / "tmp", "--local", 1, "--set", "training.rounds=50")
    assert running.stderr is not None
    lines = [""]
    while "round 0" not in lines[-1]:
        lines.append(running.stderr.readline())
        assert lines[-1], lines
    assert len(left(mark)) >= 4
    for number in numbers:
        os.kill(running.pid, number)
        time.sleep(1)
    _, rest = running.communicate(timeout=200)
    assert running.returncode == status and "Traceback" not in rest
    assert wait_until(lambda: not left(mark), 120), left(mark)
    if status == 130:
        assert "nothing is kept" in rest
        assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.slow
@pytest.mark.deploy
def test_a_method_that_nothing_can_run_is_refused_before_anything_is_started(
    tmp_path: Path, mark: str
) -> None:
    running = start(mark, tmp_path / "tmp", "--local", 1, "--method", "nonsense")
    out, err = running.communicate(timeout=200)
    assert running.returncode == 1 and not out
    assert err.count("\n") == 1 and "no method 'nonsense'" in err
    assert not left(mark)
