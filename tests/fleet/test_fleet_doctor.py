"""The doctor: every check finds what it is there for, and says how to mend it."""

from __future__ import annotations

import http.server
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fleet_folders import make_fleet

from fl_elastic.devices.platform import Memory
from fl_elastic.devices.vitals import Throttling
from fl_elastic.errors import FleetError
from fl_elastic.fleet.doctor import self_test as self_test_module
from fl_elastic.fleet.doctor.checkup import World, check_up
from fl_elastic.fleet.doctor.finding import Finding
from fl_elastic.fleet.doctor.machine import (
    TorchBuild,
    check_disk,
    check_heat,
    check_memory,
    check_swap,
    check_torch,
    torch_build,
)
from fl_elastic.fleet.doctor.self_test import self_test
from fl_elastic.fleet.doctor.trust import check_clock, check_names, check_server
from fl_elastic.fleet.health import Health, ask_health
from fl_elastic.fleet.inventory import Server
from fl_elastic.fleet.layout import FleetFolder
from fl_elastic.fleet.local import free_ports
from fl_elastic.fleet.provision import Wanted, provision

MIB, GIB = 1 << 20, 1 << 30
NOW = datetime.now(UTC)
WELL = Health(True, date=NOW)
COOL = Throttling(False, False)


def memory(total: int = 4 * GIB, free: int | None = 2 * GIB, swap: int | None = 0) -> Memory:
    return Memory(total, free, swap)


@pytest.mark.parametrize(
    ("finding", "status"),
    [
        (check_torch(None, "aarch64"), "fail"),
        (check_torch(TorchBuild("2.10.0", None), "aarch64"), "ok"),
        (check_torch(TorchBuild("2.13.0", "13.0"), "aarch64"), "warn"),
        (check_torch(TorchBuild("2.13.0", "13.0"), "x86_64"), "ok"),
        (check_memory(memory(free=None)), "skipped"),
        (check_memory(memory(free=349 * MIB)), "fail"),
        (check_memory(memory(free=699 * MIB)), "warn"),
        (check_memory(memory(free=700 * MIB)), "ok"),
        (check_swap(memory(total=GIB, swap=100 * MIB)), "warn"),
        (check_swap(memory(total=GIB, swap=GIB)), "ok"),
        (check_swap(memory(total=8 * GIB, swap=0)), "ok"),
        (check_swap(memory(swap=None)), "skipped"),
        (check_disk(None, Path("/x")), "skipped"),
        (check_disk(199 * MIB, Path("/x")), "fail"),
        (check_disk(1023 * MIB, Path("/x")), "warn"),
        (check_disk(GIB, Path("/x")), "ok"),
        (check_heat(None), "skipped"),
        (check_heat(COOL), "ok"),
        (check_heat(replace(COOL, slowed=True)), "warn"),
        (check_heat(replace(COOL, under_voltage=True)), "warn"),
        (check_names([("a", True), ("b", True)]), "ok"),
        (check_names([("a", False), ("b", True)]), "warn"),
        (check_names([("a", False)]), "fail"),
        (check_clock([("a", Health(False, "away"))], NOW), "skipped"),
        (check_clock([("a", WELL)], NOW - timedelta(seconds=59)), "ok"),
        (check_clock([("a", WELL)], NOW + timedelta(seconds=2)), "ok"),
        (check_clock([("a", WELL)], NOW + timedelta(seconds=4)), "warn"),
        (check_clock([("a", WELL)], NOW + timedelta(seconds=6)), "fail"),
        (check_clock([("a", WELL)], NOW - timedelta(seconds=61)), "warn"),
        (check_clock([("a", WELL)], NOW - timedelta(seconds=300)), "fail"),
        (check_clock([("a", WELL)], NOW - timedelta(minutes=10)), "fail"),
        (check_server(Server(("a",), 8000), [("a", Health(False)), ("b", WELL)]), "ok"),
        (check_server(Server(("a",), 8000), [("a", Health(False, "refused"))]), "fail"),
        (check_server(Server(("a",), 8000), [("a", Health(False, "refused"))], "warn"), "warn"),
        (
            check_server(Server(("a",), 8000), [("a", Health(False, "bad", None, True))], "warn"),
            "fail",
        ),
        (check_server(Server(("a",), 8000), []), "skipped"),
    ],
)
def test_each_check_tells_good_from_bad(finding: Finding, status: str) -> None:
    assert finding.status == status, finding
    assert finding.seen
    assert bool(finding.remedy) == (status in ("warn", "fail"))


def test_torch_is_recognised_without_importing_it(tmp_path: Path) -> None:
    version = tmp_path / "version.py"
    version.write_text(
        "__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
    )
    assert torch_build("2.13.0", version) == TorchBuild("2.13.0", "13.0")
    version.write_text("cuda: Optional[str] = None\nhip: Optional[str] = '6'\n")
    assert torch_build("2.10.0", version) == TorchBuild("2.10.0", None)
    assert torch_build("2.10.0", tmp_path / "none.py") == TorchBuild("2.10.0", None)
    import torch

    here = torch_build()
    assert here is not None and torch.__version__.startswith(here.version.split("+")[0])
    assert here.cuda == torch.version.cuda


def world(health: Health = WELL, *, known: bool = True, now: datetime = NOW) -> World:
    return World(lambda: now, lambda address: known, lambda *_: health)


def bad(findings: list[Finding]) -> dict[str, str]:
    about_the_machine = {
        "torch",
        "memory",
        "swap",
        "disk",
        "heat and power",
    }
    return {
        each.name: each.status
        for each in findings
        if each.status not in ("ok", "skipped") and each.name not in about_the_machine
    }


@pytest.fixture
def folder(tmp_path: Path) -> FleetFolder:
    return make_fleet(tmp_path / "fleet", "pi0")


def test_a_fresh_fleet_is_well(folder: FleetFolder) -> None:
    assert bad(check_up(folder.root, world())) == {}
    assert bad(check_up(folder.node("pi0").root, world())) == {}
    names = [each.name for each in check_up(folder.root, world())]
    assert len(names) == len(set(names)) == 15


def test_a_machine_alone_is_looked_at_too() -> None:
    assert [each.name for each in check_up(None)][:2] == ["torch", "memory"]


def test_a_server_that_is_not_started_yet_is_a_warning_for_it_and_a_failure_for_its_nodes(
    folder: FleetFolder,
) -> None:
    away = world(Health(False, "Connection refused"))
    assert bad(check_up(folder.root, away)) == {"server": "warn"}
    assert bad(check_up(folder.node("pi0").root, away)) == {"server": "fail"}


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        ("server/server.crt", {"server certificate", "chain", "server key", "certified addresses"}),
        ("server/server.key", {"server key"}),
        ("server/ca.crt", {"authority", "chain"}),
        ("fleet.toml", {"inventory"}),
    ],
)
def test_damaged_files_are_found(folder: FleetFolder, spoil: str, found: set[str]) -> None:
    (folder.root / spoil).write_text("nonsense")
    assert bad(check_up(folder.root, world())) == dict.fromkeys(found, "fail")


def test_files_of_another_fleet_are_found(folder: FleetFolder, tmp_path: Path) -> None:
    other = make_fleet(tmp_path / "other")
    folder.server_key.write_bytes(other.server_key.read_bytes())
    assert bad(check_up(folder.root, world())) == {"server key": "fail"}
    folder.server_certificate.write_bytes(other.server_certificate.read_bytes())
    assert bad(check_up(folder.root, world())) == {"chain": "fail"}


def test_an_address_without_a_certificate_is_found(folder: FleetFolder) -> None:
    text = folder.inventory.read_text()
    folder.inventory.write_text(text.replace('"127.0.0.1"', '"127.0.0.1", "server.invalid"'))
    assert bad(check_up(folder.root, world())) == {"certified addresses": "fail"}


@pytest.mark.parametrize(
    ("days", "found"),
    [
        (-2, {"authority": "fail", "server certificate": "fail"}),
        (710, {"server certificate": "warn"}),
        (731, {"server certificate": "fail"}),
        (3700, {"authority": "fail", "server certificate": "fail"}),
    ],
)
def test_certificates_out_of_their_time_are_found(
    folder: FleetFolder, days: int, found: dict[str, str]
) -> None:
    now = NOW + timedelta(days=days)
    assert bad(check_up(folder.root, world(Health(True, date=now), now=now))) == found


def test_open_secrets_are_found(folder: FleetFolder) -> None:
    folder.node("pi0").key.chmod(0o604)
    for place in (folder.root, folder.node("pi0").root):
        findings = check_up(place, world())
        assert bad(findings) == {"permissions": "fail"}
        remedy = next(each.remedy for each in findings if each.name == "permissions")
        assert "chmod" in remedy and str(folder.node("pi0").key) in remedy
    provision(folder, Wanted())
    assert bad(check_up(folder.root, world())) == {}


def test_a_nodes_key_is_looked_at(folder: FleetFolder, tmp_path: Path) -> None:
    node, other = folder.node("pi0"), make_fleet(tmp_path / "other", "pi0").node("pi0")
    node.key.write_bytes(other.key.read_bytes())
    assert bad(check_up(node.root, world())) == {"key of pi0": "fail"}
    node.key.write_text("nonsense")
    assert bad(check_up(node.root, world())) == {"key of pi0": "fail"}
    node.key.unlink()
    assert bad(check_up(node.root, world())) == {"key of pi0": "fail"}


def test_a_node_that_cannot_find_its_server(folder: FleetFolder) -> None:
    found = check_up(folder.node("pi0").root, world(known=False))
    assert bad(found) == {"name resolution": "fail"}
    folder.node("pi0").ca.unlink()
    assert bad(check_up(folder.node("pi0").root, world())) == {
        "authority": "fail",
        "server": "fail",
    }
    folder.node("pi0").settings.write_text("nonsense")
    assert bad(check_up(folder.node("pi0").root, world())) == {"settings": "fail"}


def test_another_folder_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match=r"neither fleet\.toml nor node\.toml"):
        check_up(tmp_path)


@contextmanager
def serving(folder: FleetFolder, port: int, date: str) -> Iterator[None]:
    """Serve ``/health`` with a fleet's certificate and a clock of one's own."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def date_time_string(self, timestamp: float | None = None) -> str:
            return date

        def log_message(self, *args: object) -> None:
            pass

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder.server_certificate, folder.server_key)
    httpd.socket = context.wrap_socket(httpd.socket, server_side=True)
    thread = threading.Thread(target=httpd.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()


def test_a_real_server_is_believed_only_with_the_right_authority(tmp_path: Path) -> None:
    port = free_ports(1)[0]
    folder = make_fleet(tmp_path / "fleet", "pi0", port=port)
    stranger = make_fleet(tmp_path / "stranger", "pi0", port=port)
    server = Server(("127.0.0.1",), port)
    assert not ask_health(server, "127.0.0.1", folder.ca).ok
    ten_minutes_ago = (datetime.now(UTC) - timedelta(minutes=10)).strftime(
        "%a, %d %b %Y %H:%M:%S GMT"
    )
    with serving(folder, port, ten_minutes_ago):
        assert ask_health(server, "127.0.0.1", folder.ca).ok
        refused = ask_health(server, "127.0.0.1", stranger.ca)
        assert refused.certificate_error and not refused.ok
        assert bad(check_up(folder.node("pi0").root)) == {"clock": "fail"}
        # The clock is told also where the certificate is refused, for it may be the reason.
        assert bad(check_up(stranger.node("pi0").root)) == {"clock": "fail", "server": "fail"}
    with serving(folder, port, "nonsense"):
        assert ask_health(server, "127.0.0.1", folder.ca) == Health(True)


def test_the_self_test_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = self_test()
    assert finding.status == "ok" and "tensors" in finding.seen and " s " in finding.seen

    def broken() -> str:
        raise RuntimeError("illegal instruction")

    monkeypatch.setattr(self_test_module, "_one_round", broken)
    finding = self_test()
    assert finding.status == "fail" and "illegal instruction" in finding.seen
