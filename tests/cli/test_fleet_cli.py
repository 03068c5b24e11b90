"""``fl-elastic fleet`` on the command line: results as text and JSON, mistakes as one clear line."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import Ended, call

from fl_elastic.cli import fleet_runs
from fl_elastic.cli.fleet_runs import _line, _Missing
from fl_elastic.fleet.flower_cli import FlowerCommands, NodeState, RunState, ServerUnreachable
from fl_elastic.fleet.inventory import load_inventory
from fl_elastic.fleet.layout import FleetFolder


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Calls ``fl-elastic fleet ...``; no server answers unless a test says so."""

    def away(self: FlowerCommands) -> list[NodeState]:
        raise ServerUnreachable("no server answers")

    monkeypatch.setattr(FlowerCommands, "nodes", away)

    def run(*words: object) -> Ended:
        return call(monkeypatch, capsys, "fleet", *words)

    return run


@pytest.fixture
def folder(fleet: Any, tmp_path: Path) -> Path:
    place = tmp_path / "fleet"
    made = fleet("init", place, "--server-address", "127.0.0.1", "--node", "pi0", "--nodes", 2)
    assert made.status == 0
    return place


def test_init_tells_what_it_made_and_what_it_kept(fleet: Any, tmp_path: Path) -> None:
    place = tmp_path / "fleet"
    first = fleet("init", place, "--server-address", "127.0.0.1", "--node", "pi0")
    assert f"created  {place / 'authority' / 'ca.key'}" in first.out
    second = fleet("init", place)
    assert (second.status, second.err) == (0, "")
    assert second.out.endswith("kept as they are\n") and len(second.out.splitlines()) == 1
    third = json.loads(fleet("init", place, "--server-address", "server.invalid", "--json").out)
    updated = {Path(c["path"]).name: c["why"] for c in third["changes"] if c["what"] == "updated"}
    assert "server.invalid" in updated["server.crt"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("init", "{new}"), "--server-address"),
        (("init", "{new}", "--server-address", "x", "--port", "0"), "port 0"),
        (("add", "{new}", "pi9"), "fleet init"),
        (("add", "{fleet}", "pi_9"), "node name 'pi_9'"),
        (("add", "{fleet}", "pi9", "--set", "deadline"), "expected key=value"),
        (("revoke", "{fleet}", "pi9"), "did you mean 'pi0'"),
        (("rotate", "{fleet}", "pi9"), "no node 'pi9'"),
        (("rotate", "{fleet}"), "--server"),
        (("rotate", "{fleet}", "pi0", "--server"), "--server"),
        (("register", "{fleet}"), "no server answers"),
        (("server", "{new}"), "no fleet in"),
        (("server", "{fleet}", "--host", "192.0.2.1"), "not among the addresses"),
        (("server", "{fleet}", "--port", "70000"), "port 70000"),
        (("node", "{fleet}"), "nodes/NAME"),
        (("submit", "{fleet}"), "--scenario FILE, or the folder of a Flower app"),
        (("submit", "{fleet}", "{new}"), "no Flower app"),
        (("submit", "{fleet}", "--set", "training.rounds=2"), "--scenario FILE"),
        (("submit", "{fleet}", "--scenario", "{new}"), "no scenario file"),
        (("doctor", "{new}"), "neither fleet.toml nor node.toml"),
        (("up", "--local", "2", "--set", "training.rounds=x"), "training.rounds"),
        (("up", "--local", "2", "--keep", "{fleet}"), "not empty"),
        (("up", "--local", "2", "--method", "nope"), "no method 'nope' that a real fleet can run"),
    ],
)
def test_mistakes_are_one_line(
    fleet: Any, folder: Path, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    ended = fleet(*(word.format(fleet=folder, new=tmp_path / "new") for word in words))
    assert ended.status == 1 and said in ended.err and "Traceback" not in ended.err
    assert not ended.out and ended.err.startswith("error: ")
    if "training.rounds" not in said:
        assert ended.is_one_line_of_error()
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "command",
    [
        ("init",),
        ("add", "pi9"),
        ("revoke", "pi0"),
        ("rotate", "pi0"),
        ("register",),
        ("status",),
        ("server",),
    ],
)
def test_a_damaged_inventory_is_one_line(
    fleet: Any, folder: Path, command: tuple[str, ...]
) -> None:
    (folder / "fleet.toml").write_text("version = [")
    ended = fleet(command[0], folder, *command[1:])
    assert ended.is_one_line_of_error() and "is damaged" in ended.err


def test_a_folder_that_cannot_be_written_is_one_line(fleet: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = fleet("init", tmp_path / "file" / "fleet", "--server-address", "127.0.0.1")
    assert ended.is_one_line_of_error() and "cannot make folder" in ended.err


def test_add_takes_settings(fleet: Any, folder: Path) -> None:
    assert (
        fleet("add", folder, "pi9", "--set", "deadline=60", "--set", "data-root=/srv").status == 0
    )
    text = (folder / "nodes" / "pi9" / "node.toml").read_text()
    assert "deadline = 60" in text and 'data-root = "/srv"' in text


def test_without_a_server_a_revoked_node_is_told_later(fleet: Any, folder: Path) -> None:
    ended = fleet("revoke", folder, "pi0")
    assert ended.status == 0 and "fl-elastic fleet register" in ended.err
    assert "revoked = true" in (folder / "fleet.toml").read_text()


def test_a_rotated_node_tells_what_to_copy(fleet: Any, folder: Path) -> None:
    before = (folder / "nodes" / "pi0" / "node.key").read_bytes()
    ended = fleet("rotate", folder, "pi0")
    assert ended.status == 0 and "copy the folder" in ended.out
    assert (folder / "nodes" / "pi0" / "node.key").read_bytes() != before
    assert json.loads(fleet("rotate", folder, "--server", "--json").out)["changes"]


def test_server_and_node_can_be_printed(fleet: Any, folder: Path) -> None:
    shown = json.loads(fleet("server", folder, "--print").out)
    assert "--enable-supernode-auth" in shown["command"]
    assert shown["environment"]["FLWR_HOME"] == str(folder / "server" / "flower")
    shown = json.loads(
        fleet("node", folder / "nodes" / "pi0", "--print", "--runtime-port", 9200).out
    )
    assert shown["command"][-1] == "9200"
    assert not (folder / "nodes" / "pi0" / "state").exists()


def test_help_says_what_a_service_manager_has_to_know(fleet: Any) -> None:
    said = " ".join(fleet("node", "--help").out.split())
    assert "within 60 seconds" in said and "RestartSec" in said


def test_status_without_a_server_shows_what_is_known_and_fails(fleet: Any, folder: Path) -> None:
    results = folder / "server" / "results"
    results.mkdir()
    said = {
        "step_seconds": 0.012,
        "temperature_celsius": 61.2,
        "coverage": 0.5,
        "disk_free_bytes": 2**31,
    }
    line = {"round": 7, "time": 1893456000.0, "nodes": {"pi0": said}}
    (results / "rounds.jsonl").write_text(json.dumps(line) + "\n")
    ended = fleet("status", folder)
    assert ended.status == 1 and "no server answers" in ended.err
    assert "Traceback" not in ended.err and "unknown" in ended.out
    shown = json.loads(fleet("status", folder, "--json").out)
    assert not shown["server"]
    assert shown["nodes"][0]["last"] == {
        "round": 7, "time": "1893456000.0", "step_seconds": 0.012, "temperature": 61.2,
        "coverage": 0.5, "disk_free_bytes": 2.0**31,
    }  # fmt: skip


def test_submit_says_which_nodes_are_missing(
    fleet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, told = tmp_path / "fleet", list[str]()
    fleet("init", place, "--server-address", "127.0.0.1", "--nodes", 3)
    inventory = load_inventory(FleetFolder(place).inventory)
    for number in range(3):
        known = replace(inventory.node(f"node{number}"), node_id=str(number))
        inventory = inventory.with_node(known)
    states = iter(["111", "110", "110", "away", "010", "111"])

    class Server:
        def nodes(self) -> list[NodeState]:
            if (now := next(states)) == "away":
                raise ServerUnreachable("away")
            return [
                NodeState(str(i), "online" if on == "1" else "offline") for i, on in enumerate(now)
            ]

    monkeypatch.setattr(fleet_runs, "say", told.append)
    missing = _Missing(Server(), inventory)  # type: ignore[arg-type]
    for _ in range(6 * fleet_runs._LOOKS_FOR_NODES):
        missing.look()
    assert told == [
        "waiting: 2 of 3 nodes; not online: node2", "waiting: 1 of 3 nodes; not online: node0, node2",
        "3 of 3 nodes are online",
    ]  # fmt: skip


def test_status_as_a_table(fleet: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(
        FlowerCommands, "nodes", lambda self: [NodeState("77", "online", "2030-01-01 00:00:00Z")]
    )
    results = folder / "server" / "results"
    results.mkdir()
    line = {
        "round": 7,
        "time": 1893456000.0,
        "nodes": {"pi0": {"step_seconds": 0.012, "coverage": 0.5}},
    }
    (results / "rounds.jsonl").write_text(json.dumps(line) + "\n")
    ended = fleet("status", folder)
    assert ended.status == 0
    for word in ("pi0", "unregistered", "7, 01-01 00:00", "12 ms", "50%", "77", "online"):
        assert word in ended.out
    monkeypatch.setenv("COLUMNS", "80")
    narrow = fleet("status", folder).out
    assert "unregistered" in narrow and "…" not in narrow


def test_doctor_fails_if_anything_fails(fleet: Any, folder: Path) -> None:
    (folder / "server" / "server.key").write_text("nonsense")
    ended = fleet("doctor", folder, "--json")
    assert ended.status == 1 and not ended.err
    status = {each["name"]: each["status"] for each in json.loads(ended.out)["findings"]}
    assert status["server key"] == "fail" and status["chain"] == "ok"
    assert "what to do" in fleet("doctor", folder).out


def test_doctor_trains_when_asked(fleet: Any) -> None:
    findings = json.loads(fleet("doctor", "--self-test", "--json").out)["findings"]
    assert findings[-1]["name"] == "self-test" and findings[-1]["status"] == "ok"


@pytest.mark.parametrize(("status", "code"), [("finished:completed", 0), ("finished:failed", 1)])
def test_submit_ends_as_the_run_does(
    fleet: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, status: str, code: int
) -> None:
    submitted: list[tuple[Path, str]] = []

    def run(self: FlowerCommands, app: Path, config: Path) -> str:
        submitted.append((app, config.read_text()))
        return "5"

    monkeypatch.setattr(FlowerCommands, "run", run)
    monkeypatch.setattr(
        FlowerCommands, "run_state", lambda self, run_id: RunState(run_id, status, "because")
    )
    scenario = Path(__file__).parents[2] / "simulations" / "scenarios" / "demo.toml"
    words = ("--set", "seed=2", "--set", "training.rounds=7", "--json", "--resume")
    ended = fleet("submit", folder, "--scenario", scenario, *words)
    assert ended.status == code
    assert json.loads(ended.out)["status"] == status
    assert ("because" in ended.err) == bool(code)
    app, text = submitted[0]
    assert json.loads(tomllib.loads(text)["scenario"])["training"]["rounds"] == 7
    assert app == (folder / "app").resolve()
    assert "seed = 2" in text and "resume = true" in text and "digits_cnn" in text
    assert f'results = "{(folder / "server" / "results").resolve()}"' in text


@pytest.mark.parametrize(
    ("declared", "words", "sent"),
    [
        ('results = ""', (), "{fleet}/server/results"),
        ('results = ""', ("--set", "results=/elsewhere"), "/elsewhere"),
        ('results = "/own"', (), None),
        ("seed = 0", (), None),
    ],
)
def test_an_app_of_ones_own_is_told_where_results_go(
    fleet: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    declared: str, words: tuple[str, ...], sent: str | None,
) -> None:  # fmt: skip
    """`fleet status` reads the rounds there; what a server's process calls "here" is nobody's folder."""
    submitted: list[dict[str, Any]] = []

    def run(self: FlowerCommands, app: Path, config: Path) -> str:
        submitted.append(tomllib.loads(config.read_text()))
        return "5"

    monkeypatch.setattr(FlowerCommands, "run", run)
    app = tmp_path / "own-app"
    app.mkdir()
    (app / "pyproject.toml").write_text(f"[tool.flwr.app]\n[tool.flwr.app.config]\n{declared}\n")
    assert fleet("submit", folder, app, *words, "--no-wait").out == "5\n"
    expected = None if sent is None else sent.format(fleet=folder.resolve())
    assert submitted[0].get("results") == expected


def test_without_waiting_only_the_runs_id_is_told(
    fleet: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FlowerCommands, "run", lambda self, app, config: "5")
    words = ("submit", folder, "--set", "scenario=x", "--no-wait")
    assert fleet(*words).out == "5\n"
    assert json.loads(fleet(*words, "--json").out) == {"run_id": "5"}


def test_a_round_says_who_was_left_out_and_why() -> None:
    entry = {
        "round": 3, "accuracy": 0.5, "round_seconds": 2.0, "nodes": {"pi0": {}}, "uplink_bytes": 1000,
        "rejections": [{"node": "pi1", "reason": "another release"}, "nonsense"],
    }  # fmt: skip
    assert _line(entry) == (
        "round 3, accuracy 50.00%, 2.0 s, 1 nodes, 1,000 bytes up, left out pi1: another release"
    )
    assert _line({"round": 0}) == "round 0"
