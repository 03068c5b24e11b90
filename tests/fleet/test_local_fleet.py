"""A real server and real nodes on the loopback: who is let in, what is said of runs, and that nothing stays."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import pytest
from real_processes import wait_until
from watched_fleet import QUICK, WatchedFleet

from fl_elastic.errors import FleetError
from fl_elastic.fleet.health import ask_health
from fl_elastic.fleet.inventory import load_inventory
from fl_elastic.fleet.layout import FleetFolder
from fl_elastic.fleet.local import SERVER, free_ports
from fl_elastic.fleet.members import add_node, rotate_node
from fl_elastic.fleet.register import register

pytestmark = [pytest.mark.deploy, pytest.mark.slow]

COMMAND = Path(sys.executable).with_name("fl-elastic")
PROJECT = """
[project]
name = "tiny-fleet-app"
version = "1.0.0"
[tool.flwr.app]
publisher = "test"
[tool.flwr.app.components]
serverapp = "tiny_fleet_app:server_app"
clientapp = "tiny_fleet_app:client_app"
[tool.flwr.app.config]
what = "end"
"""

APP = """
import time
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

client_app = ClientApp()
server_app = ServerApp()


@server_app.main()
def main(grid, context):
    what = context.run_config["what"]
    if what == "raise":
        raise RuntimeError("boom")
    while what == "sleep":
        time.sleep(0.2)
"""


def with_word(word: str) -> list[int]:
    """Every process whose command line or environment has this word."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
        except OSError:
            continue
        if word.encode() in text and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("app") / "tiny-fleet-app"
    place.mkdir()
    (place / "pyproject.toml").write_text(PROJECT)
    (place / "tiny_fleet_app.py").write_text(APP)
    return place


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedFleet]:
    place = tmp_path_factory.mktemp("fleet") / "here"
    with WatchedFleet(2, place) as made:
        yield made


def run(*words: object, fails: bool = False) -> str:
    ended = subprocess.run(
        [str(COMMAND), "fleet", *map(str, words)], env={**os.environ, "NO_COLOR": "1", "TERM": "dumb"},
        capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=180,
    )  # fmt: skip
    assert (ended.returncode != 0) == fails, ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stdout + (ended.stderr if fails else "")


def test_every_node_is_known_and_online(fleet: WatchedFleet) -> None:
    assert fleet.online() == {"node0", "node1"}
    done = json.loads(run("register", fleet.folder.root, "--json"))
    assert [(each["name"], each["what"]) for each in done["nodes"]] == [
        ("node0", "known"), ("node1", "known"),
    ]  # fmt: skip
    shown = json.loads(run("status", fleet.folder.root, "--json"))
    assert shown["server"] and [each["state"] for each in shown["nodes"]] == ["online"] * 2
    assert "online" in run("status", fleet.folder.root)


def test_the_doctor_is_content_with_a_running_fleet(fleet: WatchedFleet) -> None:
    for place in (fleet.folder.root, fleet.folder.node("node0").root):
        findings = json.loads(run("doctor", place, "--json"))["findings"]
        status = {each["name"]: each["status"] for each in findings}
        assert status["server"] == status["clock"] == status["name resolution"] == "ok"


def test_the_server_is_reached_by_tls_only(fleet: WatchedFleet) -> None:
    server = load_inventory(fleet.folder.inventory).server
    assert ask_health(server, "127.0.0.1", fleet.folder.ca).ok
    plain = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    with contextlib.closing(plain):
        try:
            plain.request("GET", "/health")
            status = plain.getresponse().status
        except (OSError, http.client.HTTPException) as error:
            status = error
    assert status != HTTPStatus.OK


def test_a_run_that_ends_well(fleet: WatchedFleet, app: Path) -> None:
    state = json.loads(run("submit", fleet.folder.root, app, "--json"))
    assert state["status"] == "finished:completed"


def test_a_run_that_fails_is_a_failure(fleet: WatchedFleet, app: Path) -> None:
    said = run("submit", fleet.folder.root, app, "--set", "what=raise", fails=True)
    assert "finished:failed" in said and "error: run" in said


def test_a_setting_that_the_app_does_not_have(fleet: WatchedFleet, app: Path) -> None:
    assert "it has: what" in run("submit", fleet.folder.root, app, "--set", "who=me", fails=True)


def test_an_interruption_stops_the_run(fleet: WatchedFleet, app: Path) -> None:
    waiting = subprocess.Popen(
        [str(COMMAND), "fleet", "submit", str(fleet.folder.root), str(app), "--set", "what=sleep"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert waiting.stderr is not None
    lines = [waiting.stderr.readline()]
    run_id = lines[0].split()[1]
    while "running" not in lines[-1]:
        lines.append(waiting.stderr.readline())
        assert lines[-1], lines
    time.sleep(1)
    os.killpg(waiting.pid, signal.SIGINT)
    _, rest = waiting.communicate(timeout=60)
    assert waiting.returncode == 130, rest
    assert "Traceback" not in rest
    assert fleet.flower.run_state(run_id).status == "finished:stopped"


def test_a_key_that_nobody_registered_is_refused(fleet: WatchedFleet) -> None:
    add_node(
        fleet.folder, "stranger",
        {"runtime-port": free_ports(1)[0], "state-dir": str(fleet.folder.root / "state" / "stranger")},
    )  # fmt: skip
    member = fleet.start("stranger")
    assert member.process.wait(60) != 0
    assert "stranger" not in fleet.online()
    register(fleet.folder, fleet.flower)
    fleet.start("stranger")
    fleet.wait_online(["stranger"], 60)


def test_a_revoked_node_is_out_and_a_rotated_one_is_in_again(fleet: WatchedFleet) -> None:
    done = json.loads(run("revoke", fleet.folder.root, "node1", "--json"))
    assert [each["what"] for each in done["nodes"]] == ["unregistered", "refused"]
    assert "node1" not in fleet.online()
    # The key is worth nothing, also for a process that starts with it.
    fleet.stop("node1")
    assert fleet.start("node1").process.wait(60) != 0
    rotate_node(fleet.folder, "node1")
    register(fleet.folder, fleet.flower)
    fleet.start("node1")
    fleet.wait_online(["node1"], 60)


def test_a_killed_server_is_back_with_all_its_nodes(fleet: WatchedFleet) -> None:
    before = fleet.online()
    fleet.kill(SERVER)
    assert not fleet.members[SERVER].running
    fleet.start(SERVER)
    fleet.wait_for_server()
    fleet.wait_online(sorted(before), 120)


def test_a_node_that_was_killed_comes_back(fleet: WatchedFleet) -> None:
    fleet.kill("node0")
    assert not fleet.members["node0"].running
    fleet.start("node0")
    # Within the minute that Flower takes to miss it, it is refused, and started again and again.
    fleet.wait_back(["node0"], 120)


def test_a_second_server_says_that_the_port_is_taken(fleet: WatchedFleet) -> None:
    said = run("server", fleet.folder.root, "--host", "127.0.0.1", fails=True)
    assert "in use" in said and len(said.splitlines()) == 1


def test_the_server_command_becomes_flowers_process(tmp_path: Path) -> None:
    from fleet_folders import make_fleet

    folder = make_fleet(tmp_path / "fleet", port=free_ports(1)[0])
    server = load_inventory(folder.inventory).server
    started = subprocess.Popen(
        [str(COMMAND), "fleet", "server", str(folder.root), "--host", "127.0.0.1"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert wait_until(lambda: ask_health(server, "127.0.0.1", folder.ca).ok, 60)
        line = Path(f"/proc/{started.pid}/cmdline").read_text()
        assert "flower-superlink" in line and "fl-elastic" not in line.split("\0")[1]
    finally:
        started.terminate()
        assert started.wait(30) is not None
    assert wait_until(lambda: with_word(str(folder.root)) == [], 10)


def test_nothing_is_left_after_an_error(app: Path) -> None:
    seen: list[Path] = []
    with pytest.raises(ZeroDivisionError):
        with WatchedFleet(1) as fleet:
            seen.append(fleet.folder.root)
            run_id = fleet.submit(app, what="sleep")
            assert wait_until(lambda: fleet.flower.run_state(run_id).status == "running", 60)
            assert len(with_word(str(fleet.folder.root))) >= 4
            raise ZeroDivisionError
    assert with_word(str(seen[0])) == []
    assert not seen[0].exists()


def test_a_fleet_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    environment = {"PYTHONPATH": str(tmp_path)}
    (tmp_path / "flwr.py").write_text("raise SystemExit('this Flower is broken')")
    place = tmp_path / "fleet"
    with pytest.raises(FleetError, match=r"did not come up.*this Flower is broken"):
        with WatchedFleet(1, place, environment=environment):
            pass
    assert with_word(str(place)) == []


def test_nothing_is_left_when_the_parent_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from fl_elastic.fleet.local import LocalFleet\n"
        "with LocalFleet(1, Path(sys.argv[1])) as fleet: print('up', flush=True); time.sleep(600)"
    )
    place = tmp_path / "fleet"
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(place)], env={**os.environ, **QUICK},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert parent.stdout is not None
    try:
        assert parent.stdout.readline() == "up\n"
        assert len(with_word(str(place))) >= 4
    finally:
        parent.kill()
        parent.wait()
    assert wait_until(lambda: with_word(str(place)) == [], 15), with_word(str(place))


def test_the_port_and_the_folder_of_a_fleet_stay_its_own(fleet: WatchedFleet) -> None:
    folder = FleetFolder(fleet.folder.root)
    assert folder.state.is_file()
    for member in fleet.members.values():
        home = Path(f"/proc/{member.process.pid}/environ").read_text()
        assert f"FLWR_HOME={fleet.folder.root}" in home
        assert "FLWR_TELEMETRY_ENABLED=0" in home
