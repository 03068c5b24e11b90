"""One federated round with a node in an arm64 root: ``federated_round.py ROOT``, as root, called by the script."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from fl_elastic.errors import ElasticError, FleetError
from fl_elastic.fleet.flower_cli import FlowerCommands, flower_at
from fl_elastic.fleet.health import ask_health
from fl_elastic.fleet.inventory import load_inventory
from fl_elastic.fleet.layout import FleetFolder
from fl_elastic.fleet.local import free_ports
from fl_elastic.fleet.member import Member, end_members, start_member
from fl_elastic.fleet.provision import Wanted, provision
from fl_elastic.fleet.register import register
from fl_elastic.fleet.serve import Launch, server_launch
from fl_elastic.fleet.submit import submit, wait_for_run
from fl_elastic.fleet.up import result_of
from fl_elastic_simulations.fleet.scenario_text import scenario_text

NODE = "pi0"
HOST = "127.0.0.1"
INSIDE = "/opt/node"
"""Where the node's folder is in the root."""

PATIENCE = 600.0
"""Seconds for anything that is emulated."""

_IMPORTS = "import flwr.supernode.runtime.run_clientapp, fl_elastic_simulations.fleet.app"

ROUNDS = 3
"""One is enough; Flower gives up a process that is not alive in 30 s, which a busy emulator may need."""


def tell(text: str) -> None:
    """Print at once what happens."""
    print(f"aarch64: {text}", flush=True)


def node_launch(root: Path, node: Path, port: int) -> Launch:
    """Copy the node's folder into the root, as onto a card, and return how the node is started there."""
    place = root / INSIDE.lstrip("/")
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(node, place)
    enter = Path(__file__).with_name("enter.sh")
    command = (str(enter), str(root), "fl-elastic", "fleet", "node", INSIDE)
    # What is imported for the first time is compiled, which takes longer in an emulator than Flower waits.
    subprocess.run([str(enter), str(root), "python", "-c", _IMPORTS], check=True)
    arguments = (*command, "--runtime-port", str(port))
    return Launch(arguments, dict(os.environ), (root,), HOST, port)


def wait(what: str, done: Callable[[], bool], member: Member, seconds: float = PATIENCE) -> None:
    """Return once ``done()`` is true.

    Raises
    ------
    FleetError
        If it is not in time, or the process ends before.
    """
    until = time.monotonic() + seconds
    while not done():
        if not member.running or time.monotonic() > until:
            end = "\n".join(member.log.read_text(errors="replace").splitlines()[-20:])
            raise FleetError(f"{what}: not within {seconds:.0f} s, or the process ended:\n{end}")
        time.sleep(1.0)


def run(root: Path, place: Path) -> None:
    """Start server and node, train one round, and check what came out."""
    port, runtime_port = free_ports(2)
    folder = FleetFolder(place)
    provision(folder, Wanted(addresses=[HOST], port=port, nodes=[NODE]))
    members: list[Member] = []
    try:
        native = server_launch(folder, os.environ, HOST)
        members.append(start_member(place / "logs", "server", native))
        server = load_inventory(folder.inventory).server
        wait("the server", lambda: ask_health(server, HOST, folder.server_ca).ok, members[0], 90.0)
        flower: FlowerCommands = flower_at(folder, server)
        register(folder, flower)
        tell("server is up and knows the node's key")
        began = time.monotonic()
        launch = node_launch(root, folder.node(NODE).root, runtime_port)
        members.append(start_member(place / "logs", NODE, launch))
        wait("the node", lambda: "online" in {n.status for n in flower.nodes()}, members[1])
        tell(f"the emulated node is online after {time.monotonic() - began:.0f} s")
        began = time.monotonic()
        changes = [f"training.rounds={ROUNDS}", "training.local_epochs=1"]
        scenario = scenario_text(None, changes, 1)
        settings = {
            "scenario": scenario,
            "method": "elastic",
            "results": str(folder.results),
        }
        run_id = submit(flower, folder.app, settings)
        state = wait_for_run(flower, run_id, tell)
        tell(f"the run took {time.monotonic() - began:.0f} s")
        result = result_of(folder.results, state)
        tell(f"result: {result}")
        if not state.completed or not folder.rounds.is_file():
            logs = [member.log.read_text(errors="replace")[-3000:] for member in members]
            raise FleetError("the run did not complete\n" + "\n".join(logs))
        rounds = [json.loads(line) for line in folder.rounds.read_text().splitlines()]
        for each in rounds:
            tell(json.dumps(each)[:1000])
        if not any(each.get("accepted") for each in rounds):
            raise FleetError(f"no update of the node was merged in {len(rounds)} rounds")
    finally:
        for member in reversed(members):
            end_members([member])


def main() -> None:
    """Run in a temporary folder, and end with one clear line if it fails."""
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    place = Path(tempfile.mkdtemp(prefix="fl-elastic-aarch64-"))
    try:
        run(Path(sys.argv[1]).resolve(), place)
    except (ElasticError, OSError, subprocess.SubprocessError) as error:
        sys.exit(f"aarch64: error: {error}\naarch64: logs are kept in {place}")
    shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main()
