"""Behind the gateway nodes train, and nobody submits an app."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from faulty_fleet import Outsider, improved, rounds_of, scenario_text, wait_until
from watched_fleet import WatchedFleet

from fl_elastic.fleet.inventory import load_inventory
from fl_elastic.fleet.local import free_ports
from fl_elastic.fleet.members import add_node
from fl_elastic.fleet.register import register

pytestmark = [
    pytest.mark.deploy,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx"),
]

CONFIG = Path(__file__).parents[2] / "deploy" / "gateway" / "nginx.conf"


@contextmanager
def gateway(fleet: WatchedFleet, port: int) -> Iterator[None]:
    """The shipped configuration, with this fleet's places."""
    inner = load_inventory(fleet.folder.inventory).server.port
    root = fleet.folder.root
    text = CONFIG.read_text()
    for shipped, ours in (
        ("FLEET/", f"{root}/"),
        ("127.0.0.1:8001", f"127.0.0.1:{inner}"),
        ("listen 8000 ssl", f"listen 127.0.0.1:{port} ssl"),
        ("/run/fl-elastic-gateway.pid", f"{root}/gateway.pid"),
        # Whoever runs this test can read the keys.
        ("worker_processes auto;", "worker_processes 1; daemon off; master_process off;"),
    ):
        assert shipped in text
        text = text.replace(shipped, ours)
    path = root / "nginx.conf"
    path.write_text(text)
    log = root / "logs" / "gateway.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            ["nginx", "-c", str(path), "-e", "stderr"], stdout=stream, stderr=stream,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    try:
        wait_until(lambda: _answers(fleet, port), 20, log.read_text())
        yield
    finally:
        process.terminate()
        process.wait(20)


def _answers(fleet: WatchedFleet, port: int) -> bool:
    from fl_elastic.fleet.health import ask_health

    server = replace(load_inventory(fleet.folder.inventory).server, port=port)
    return ask_health(server, "127.0.0.1", fleet.folder.server_ca).ok


def test_nodes_pass_and_operators_do_not() -> None:
    with WatchedFleet(1, config={"threads": 1}) as fleet:
        inner, outer = load_inventory(fleet.folder.inventory).server.port, free_ports(1)[0]
        with gateway(fleet, outer):
            state = fleet.folder.root / "state" / "far"
            config = {
                "state-dir": str(state), "partition-id": 1, "threads": 1,
                "runtime-port": free_ports(1)[0],
            }  # fmt: skip
            add_node(fleet.folder, "far", config)
            register(fleet.folder, fleet.flower)
            settings = fleet.folder.node("far").settings
            settings.write_text(
                settings.read_text().replace(f"port = {inner}\n", f"port = {outer}\n")
            )
            with Outsider(fleet, "far", {}):
                wait_until(lambda: "far" in fleet.online(), 120, "the node behind the gateway")
                run = fleet.submit(
                    scenario=scenario_text(2, rounds=3), results=str(fleet.folder.results)
                )
                assert fleet.wait(run).completed
                assert all("far" in line["nodes"] for line in rounds_of(fleet))
                assert improved(fleet)
            # With all that a node holds, through the gateway nobody runs, lists or registers anything.
            outside = fleet.folder.root / "outside"
            outside.mkdir()
            connection = (fleet.folder.operator / "config.toml").read_text()
            assert f":{inner}" in connection
            (outside / "config.toml").write_text(connection.replace(f":{inner}", f":{outer}"))
            command = shutil.which("flwr", path=str(Path(sys.executable).parent))
            assert command is not None
            for arguments in (
                ("run", str(fleet.folder.app), "fleet"),
                ("ls", "fleet"),
                ("supernode", "list", "fleet"),
                ("supernode", "register", str(fleet.folder.node("far").public_key), "fleet"),
            ):
                done = subprocess.run(
                    [command, *arguments, "--format", "json"],
                    env={**_plain(), "FLWR_HOME": str(outside)}, cwd=outside,
                    stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
                )  # fmt: skip
                assert '"success": true' not in done.stdout, (arguments, done.stdout)
            before = len(fleet.flower.nodes())
            assert before == 2


def _plain() -> dict[str, str]:
    import os

    proxies = {"http_proxy", "https_proxy", "all_proxy"}
    kept = {name: value for name, value in os.environ.items() if name.lower() not in proxies}
    return kept | {
        "NO_PROXY": "127.0.0.1", "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
        "NO_COLOR": "1", "TERM": "dumb",
    }  # fmt: skip
