"""``flwr run simulations`` in a copy of the repository, as a user of Flower's own command starts it.

In this process the app is run by ``test_app.py`` each time.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from real_processes import (
    binary,
    end,
    environment,
    free_port,
    status_of,
    superlink_of,
    with_all_below,
)

from fl_elastic_simulations.engine.client import LATE

pytestmark = [pytest.mark.deploy, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[3]

Run = Callable[[dict[str, str]], str]


def copied(target: Path) -> Path:
    """A copy of what is, or is about to be, in the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target / name)
    return target


@pytest.fixture(scope="module")
def flwr_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Submits the app with a run config, waits, and returns the status of the run."""
    place = tmp_path_factory.mktemp("flwr")
    app = copied(place / "fl-elastic") / "simulations"
    # Clients import from where the daemon was started, so it starts in a folder without code.
    neutral = place / "neutral"
    neutral.mkdir()
    port = free_port()
    env = environment(place / "home", FLWR_LOCAL_SUPERLINK_HTTP_API_PORT=str(port))
    (place / "home" / "config.toml").write_text(
        '[superlink]\ndefault = "test"\n\n[superlink.test]\naddress = ":local-in-memory:"\n'
    )

    def run(config: dict[str, str]) -> str:
        path = place / "run.toml"
        path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in config.items()))
        submitted = subprocess.run(
            [
                binary("flwr"), "run", str(app), "--stream", "--format", "json",
                "--federation-config",
                # One process for clients: the quickstart runs with several.
                f"num-supernodes=10 client-resources-num-cpus={os.cpu_count()}",
                "--run-config", str(path),
            ],
            env=env, cwd=neutral, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=300,
        )  # fmt: skip
        assert submitted.returncode == 0, submitted.stdout + submitted.stderr
        return status_of(json.loads(submitted.stdout)["run-id"], (), env, neutral)

    try:
        yield run
    finally:
        end(with_all_below(*superlink_of(port)))


def test_a_scenario_completes_and_writes_its_results(flwr_run: Run, tmp_path: Path) -> None:
    changes = (
        "training.rounds=2; seeds=0; methods=elastic; target.method=elastic; "
        "training.client_fraction=0.4"
    )
    status = flwr_run({"scenario": "demo", "set": changes, "output": str(tmp_path / "out")})
    assert status == "finished:completed"
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    found = summary["methods"]["elastic"]
    assert found["rounds"] == 2
    # Where the host is busy, what a device does before its first step may cost more than its budget: that is said.
    reasons = [each["reason"] for each in found["rejections"]]
    assert all(LATE in reason for reason in reasons), reasons
    assert found["uplink_bytes"] > 0
    assert summary["clients"] == 10
    assert (tmp_path / "out" / "report.html").stat().st_size > 1000


def test_a_scenario_that_does_not_exist_fails(flwr_run: Run) -> None:
    assert flwr_run({"scenario": "no_such_scenario"}) == "finished:failed"
