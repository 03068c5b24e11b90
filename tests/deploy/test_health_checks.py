"""The watchdog of a service and the health check of the container, against real servers."""

from __future__ import annotations

import os
import runpy
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from deployed_files import DEPLOY

from fl_elastic.fleet.layout import FleetFolder
from fl_elastic.fleet.provision import Wanted, provision

SCRIPT = DEPLOY / "systemd/fl-elastic-health"
HEALTHY = DEPLOY / "container/healthy.py"
NOBODY = "http://127.0.0.1:9/health"

needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is missing")


class Answers(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


class Fails(Answers):
    status = 500


@contextmanager
def serving(
    handler: type[BaseHTTPRequestHandler], tls: ssl.SSLContext | None = None
) -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield int(server.server_address[1])
        finally:
            server.shutdown()
            thread.join()


class Machine:
    """A machine whose systemctl writes down what it is asked."""

    def __init__(self, place: Path, active: bool = True) -> None:
        self.place = place
        self.log = place / "systemctl.log"
        (place / "bin").mkdir()
        systemctl = place / "bin/systemctl"
        systemctl.write_text(
            f'#!/bin/sh\ncase "$*" in *is-active*) exit {0 if active else 3} ;;'
            f' show*) echo 5af3; exit ;; esac\necho "$*" >>"{self.log}"\n'
        )
        journal = place / "bin/journalctl"
        journal.write_text(
            f'#!/bin/sh\ncase "$*" in *_SYSTEMD_INVOCATION_ID=5af3*) cat "{place}/printed" ;; esac\n'
        )
        self.printed("INFO : Connected")
        for command in (systemctl, journal):
            command.chmod(0o755)

    def printed(self, text: str) -> None:
        """What the service has printed since it was started."""
        (self.place / "printed").write_text(text + "\n")

    def ask(
        self, *arguments: str, url: str = NOBODY, **more: str
    ) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": f"{self.place / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "RUNTIME_DIRECTORY": str(self.place),
            "FL_ELASTIC_HEALTH_URL": url,
            "http_proxy": "http://127.0.0.1:9",
        }
        return subprocess.run(
            [str(SCRIPT), *arguments], env=environment | more, capture_output=True, text=True
        )

    @property
    def restarted(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@needs_curl
def test_silence_three_times_in_a_row_is_a_restart(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for _ in range(2):
        assert machine.ask("node").returncode == 0
    assert machine.restarted == []
    assert "restarting" in machine.ask("node").stdout
    assert machine.restarted == ["restart fl-elastic-node.service"]
    machine.ask("node")
    assert len(machine.restarted) == 1, "it starts counting again"


@needs_curl
def test_a_node_that_has_given_up_is_restarted_although_it_answers(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    with serving(Answers) as port:
        url = f"http://127.0.0.1:{port}/health"
        machine.ask("node", url=url)
        assert machine.restarted == []
        machine.printed("WARNING :   Giving up reconnection after 19.05 seconds and 6 tries.")
        assert "given up" in machine.ask("node", url=url).stdout
        assert machine.restarted == ["restart fl-elastic-node.service"]
        # A server has nobody to give up.
        machine.ask("server", url=url, FL_ELASTIC_HEALTH_CA="")
        assert len(machine.restarted) == 1


@needs_curl
def test_an_answer_starts_the_count_again(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    with serving(Answers) as port:
        for _ in range(3):
            machine.ask("node"), machine.ask("node")
            assert machine.ask("node", url=f"http://127.0.0.1:{port}/health").returncode == 0
    assert machine.restarted == []


@needs_curl
def test_an_answer_with_an_error_is_silence(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    with serving(Fails) as port:
        for _ in range(3):
            machine.ask("server", url=f"http://127.0.0.1:{port}/health", FL_ELASTIC_HEALTH_CA="")
    assert machine.restarted == ["restart fl-elastic-server.service"]


@needs_curl
def test_a_service_that_is_stopped_stays_stopped(tmp_path: Path) -> None:
    machine = Machine(tmp_path, active=False)
    for _ in range(4):
        assert machine.ask("node").returncode == 0
    assert machine.restarted == []


@needs_curl
def test_only_asking_restarts_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for _ in range(4):
        assert machine.ask("node", "--once").returncode != 0
    with serving(Answers) as port:
        assert machine.ask("node", "--once", url=f"http://127.0.0.1:{port}/health").returncode == 0
    assert machine.restarted == []


def test_other_parts_are_refused(tmp_path: Path) -> None:
    asked = Machine(tmp_path).ask("kettle")
    assert asked.returncode == 2
    assert asked.stderr == "fl-elastic-health: kettle is neither server nor node\n"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> FleetFolder:
    folder = FleetFolder(tmp_path_factory.mktemp("fleet"))
    provision(folder, Wanted(addresses=["server.example"]))
    return folder


def speaking_tls(fleet: FleetFolder) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(fleet.server_certificate, fleet.server_key)
    return context


@needs_curl
def test_the_server_is_asked_over_tls_with_its_own_authority(
    tmp_path: Path, fleet: FleetFolder
) -> None:
    machine = Machine(tmp_path)
    with serving(Answers, speaking_tls(fleet)) as port:
        url = f"https://localhost:{port}/health"
        trusted = machine.ask(
            "server", "--once", url=url, FL_ELASTIC_HEALTH_CA=str(fleet.server_ca)
        )
        stranger = tmp_path / "stranger"
        provision(FleetFolder(stranger), Wanted(addresses=["other.example"]))
        other = str(FleetFolder(stranger).server_ca)
        refused = machine.ask("server", "--once", url=url, FL_ELASTIC_HEALTH_CA=other)
    assert trusted.returncode == 0, trusted.stderr
    assert refused.returncode != 0


def test_the_container_asks_over_tls(fleet: FleetFolder) -> None:
    healthy = runpy.run_path(str(HEALTHY))["healthy"]
    inventory = fleet.inventory.read_text()
    try:
        for handler, wanted in ((Answers, True), (Fails, False)):
            with serving(handler, speaking_tls(fleet)) as port:
                fleet.inventory.write_text(inventory.replace("port = 8000", f"port = {port}"))
                assert healthy(fleet.root) is wanted
    finally:
        fleet.inventory.write_text(inventory)


def test_the_container_says_why_it_is_not_healthy(tmp_path: Path) -> None:
    ended = subprocess.run(["python3", str(HEALTHY), str(tmp_path)], capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.startswith("not healthy: ") and "Traceback" not in ended.stderr
