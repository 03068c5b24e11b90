"""Clocks, certificates, keys and models that are wrong: the one concerned is refused, the others go on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from faulty_fleet import Outsider, improved, note, rounds_of, scenario_text, wait_until
from watched_fleet import WatchedFleet

from fl_elastic.fleet.certificates import renew_server
from fl_elastic.fleet.inventory import load_inventory
from fl_elastic.fleet.local import SERVER, free_ports
from fl_elastic.fleet.members import add_node, revoke_node
from fl_elastic.fleet.register import register

pytestmark = [pytest.mark.deploy, pytest.mark.slow, pytest.mark.faults]

COMMAND = Path(sys.executable).with_name("fl-elastic")


def train(fleet: WatchedFleet, nodes: int, rounds: int = 2, **settings: bool) -> None:
    run = fleet.submit(
        scenario=scenario_text(nodes, rounds), results=str(fleet.folder.results),
        node_timeout=10.0, **settings,
    )  # fmt: skip
    state = fleet.wait(run)
    assert state.completed, state


def newcomer(fleet: WatchedFleet, *, registered: bool, partition: int = 1) -> str:
    """A node more in the fleet's folder."""
    name = "odd"
    state = fleet.folder.root / "state" / name
    config = {
        "state-dir": str(state),
        "partition-id": partition,
        "threads": 1,
        "runtime-port": free_ports(1)[0],
    }
    add_node(fleet.folder, name, config)
    if registered:
        register(fleet.folder, fleet.flower)
    return name


def doctor(folder: Path, *before: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, str(COMMAND), "fleet", "doctor", str(folder)],
        capture_output=True, text=True, timeout=120, env={**os.environ, "COLUMNS": "300"},
    )  # fmt: skip


@pytest.mark.skipif(shutil.which("faketime") is None, reason="needs faketime (apt: faketime)")
def test_a_node_whose_clock_is_ten_minutes_off_is_refused_until_it_is_right() -> None:
    with WatchedFleet(1, config={"threads": 1}) as fleet:
        name = newcomer(fleet, registered=True)
        with Outsider(fleet, name, {}, "faketime", "-f", "+10m") as odd:
            train(fleet, nodes=2)
            assert name not in fleet.online()
            assert all(list(line["nodes"]) == ["node0"] for line in rounds_of(fleet))
            said = odd.said()
        found = doctor(fleet.folder.node(name).root, "faketime", "-f", "+10m")
        assert found.returncode == 1 and "clock" in found.stdout, found.stdout + found.stderr
        assert improved(fleet)
        with Outsider(fleet, name, {}):
            started = time.monotonic()
            wait_until(lambda: name in fleet.online(), 120, "the node with the right clock")
            note("clock ten minutes off", lost="nothing; that node takes no part",
                 back_after_correction=time.monotonic() - started, node_says=_last(said))  # fmt: skip


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][-200:] if lines else ""


def test_an_expired_certificate_is_named_and_a_new_one_lets_all_nodes_back() -> None:
    with WatchedFleet(2, config={"threads": 1}) as fleet:
        train(fleet, nodes=2, rounds=1)
        server = load_inventory(fleet.folder.inventory).server
        long_ago = datetime.now(UTC) - timedelta(days=3 * 365)
        for _ in renew_server(fleet.folder, server, long_ago):
            pass
        fleet.stop(SERVER)
        fleet.start(SERVER)
        time.sleep(15)
        found = doctor(fleet.folder.node("node0").root)
        assert found.returncode == 1 and "expired" in found.stdout.lower(), found.stdout
        rotated = subprocess.run(
            [str(COMMAND), "fleet", "rotate", str(fleet.folder.root), "--server"],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert rotated.returncode == 0, rotated.stderr
        fleet.stop(SERVER)
        started = time.monotonic()
        fleet.start(SERVER)
        fleet.wait_for_server()
        # Flower's node gives up over a bad certificate and neither ends nor tries again: the health timer of a
        # device restarts it, as is done here.
        for name in fleet.names:
            assert fleet.members[name].running and "certificate has expired" in fleet.log(name)
            # Nor does it show from outside: the timer looks for these words in the log.
            assert _health_of(fleet, name) == "200"
            assert "Giving up reconnection" in fleet.log(name)
            fleet.stop(name)
            fleet.start(name)
        fleet.wait_back(fleet.names, 180)
        back = time.monotonic() - started
        train(fleet, nodes=2, rounds=3, resume=True)
        assert rounds_of(fleet)[-1]["accepted"] == 2 and improved(fleet)
        note("server's certificate expired", lost="no round while it lasted",
             back_after_rotation=back)  # fmt: skip


def _health_of(fleet: WatchedFleet, name: str) -> str:
    import urllib.request

    from fl_elastic.fleet.node_settings import load_node_settings

    port = load_node_settings(fleet.folder.node(name).settings).config["runtime-port"]
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return str(answer.status)
    except OSError as error:
        return str(error)


def test_a_key_that_nobody_registered_is_refused() -> None:
    with WatchedFleet(1, config={"threads": 1}) as fleet:
        name = newcomer(fleet, registered=False)
        with Outsider(fleet, name, {}) as odd:
            train(fleet, nodes=2)
            assert all(list(line["nodes"]) == ["node0"] for line in rounds_of(fleet))
            assert odd.ended or name not in fleet.online()
            note("unregistered key", lost="nothing", node_says=_last(odd.said()))
        assert improved(fleet)


def test_a_revoked_node_is_shut_out_of_the_next_round_on() -> None:
    with WatchedFleet(2, config={"threads": 1}) as fleet:
        train(fleet, nodes=2, rounds=1)
        assert rounds_of(fleet)[-1]["accepted"] == 2
        revoke_node(fleet.folder, "node1")
        register(fleet.folder, fleet.flower)
        started = time.monotonic()
        wait_until(lambda: fleet.online() == {"node0"}, 120, "the revoked node to be out")
        out = time.monotonic() - started
        train(fleet, nodes=2, rounds=3, resume=True)
        assert [list(line["nodes"]) for line in rounds_of(fleet)[1:]] == [["node0"], ["node0"]]
        assert improved(fleet)
        note("revoked key", lost="that node's part", out_after=out)


OTHER_MODEL = """
import sys
import importlib.abc


class Widen(importlib.abc.MetaPathFinder):
    # As if an older release of the node's software built this model with other widths.
    def find_spec(self, name, path=None, target=None):
        if name != "fl_elastic_simulations.fleet.node":
            return None
        sys.meta_path.remove(self)
        import torch
        import fl_elastic_simulations.engine.workload as workload
        original = workload.scenario_model

        def narrower(*arguments):
            model = original(*arguments)
            for module_name, module in model.named_modules():
                if isinstance(module, torch.nn.Linear):
                    parent = model.get_submodule(module_name.rpartition(".")[0])
                    narrow = torch.nn.Linear(module.in_features, module.out_features + 1)
                    setattr(parent, module_name.rpartition(".")[2], narrow)
            return model

        workload.scenario_model = narrower
        return None


sys.meta_path.insert(0, Widen())
"""


def test_an_update_of_another_model_version_is_left_out_and_said(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(OTHER_MODEL)
    with WatchedFleet(1, config={"threads": 1}) as fleet:
        name = newcomer(fleet, registered=True)
        with Outsider(fleet, name, {"PYTHONPATH": str(tmp_path)}):
            wait_until(lambda: name in fleet.online(), 120, "the node to be online")
            train(fleet, nodes=2, rounds=3)
            lines = rounds_of(fleet)
            assert all(list(line["nodes"]) == ["node0"] for line in lines)
            reasons = {each["reason"] for line in lines for each in line["rejections"]}
            assert len(lines) == 3 and len(reasons) == 1
            assert "another model version" in reasons.pop()
            assert {each["node"] for line in lines for each in line["rejections"]} == {name}
        assert improved(fleet)
        note("node with another model version", lost="its updates",
             server_says=lines[0]["rejections"][0]["reason"][:200])  # fmt: skip
