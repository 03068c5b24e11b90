"""Command lines and environments of Flower's processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fleet_folders import make_fleet
from flwr.common.config import parse_config_args
from hypothesis import given
from hypothesis import strategies as st

from fl_elastic.errors import FleetError
from fl_elastic.fleet import serve as serve_module
from fl_elastic.fleet.commands import (
    command_path,
    config_text,
    flower_environment,
    superlink_arguments,
)
from fl_elastic.fleet.layout import FleetFolder, NodeFolder
from fl_elastic.fleet.members import add_node
from fl_elastic.fleet.serve import (
    Launch,
    become,
    check_port_is_free,
    node_launch,
    resolves,
    server_launch,
)

BASE = {"PATH": "/usr/bin", "HOME": "/root"}

scalars = st.one_of(
    st.booleans(),
    st.integers(-(2**62), 2**62),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=("Cs",)), max_size=30),
)


@given(config=st.dictionaries(st.from_regex(r"[a-z][a-z0-9-]{0,8}", fullmatch=True), scalars))
def test_flower_reads_the_settings_that_were_meant(
    config: dict[str, bool | int | float | str],
) -> None:
    assert parse_config_args([config_text(config)] if config else None) == config


@pytest.mark.parametrize(
    "text", ['a "b" c', "it's", "a=b c=d", "\\", "x\ny", "", "run.toml", "\x7f", 'end"']
)
def test_flower_reads_awkward_texts(text: str) -> None:
    config = {"first": 1, "text": text, "last": True}
    assert parse_config_args([config_text(config)]) == config
    assert parse_config_args([config_text({"text": text})]) == {"text": text}


def after(command: tuple[str, ...], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_the_server_asks_for_tls_and_keys(tmp_path: Path) -> None:
    folder = make_fleet(tmp_path / "fleet")
    launch = server_launch(folder, BASE)
    assert Path(launch.command[0]).name == "flower-superlink"
    assert "--enable-supernode-auth" in launch.command and "--insecure" not in launch.command
    assert "--disable-runtime-dependency-installation" in launch.command
    assert after(launch.command, "--ssl-certfile") == str(folder.server_certificate)
    assert after(launch.command, "--ssl-keyfile") == str(folder.server_key)
    assert after(launch.command, "--ssl-ca-certfile") == str(folder.server_ca)
    assert after(launch.command, "--database") == str(folder.state)
    # Whoever reaches its port can have every node run code.
    assert after(launch.command, "--host") == "127.0.0.1" and "this machine alone" in launch.notice
    assert server_launch(folder, BASE, "0.0.0.0").notice == ""
    assert (after(launch.command, "--port"), launch.port) == ("8000", 8000)
    assert str(folder.authority) not in " ".join(launch.command)
    assert launch.environment["FLWR_HOME"] == str(folder.server / "flower")


def test_the_server_needs_no_authority(tmp_path: Path) -> None:
    folder = make_fleet(tmp_path / "fleet")
    folder.authority.rename(tmp_path / "elsewhere")
    server_launch(folder, BASE)
    folder.server_key.unlink()
    with pytest.raises(FleetError, match=r"server\.key is missing"):
        server_launch(folder, BASE)


def test_a_relative_folder_becomes_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_fleet(tmp_path / "fleet", "pi0")
    monkeypatch.chdir(tmp_path)
    for launch in (
        server_launch(FleetFolder(Path("fleet")), BASE),
        node_launch(NodeFolder(Path("fleet/nodes/pi0")), BASE),
    ):
        paths = [word for word in launch.command if "fleet" in word]
        assert paths and all(str(tmp_path) in word for word in paths)


def test_a_host_must_be_certified(tmp_path: Path) -> None:
    folder = make_fleet(tmp_path / "fleet")
    server_launch(folder, BASE, host="127.0.0.1")
    with pytest.raises(FleetError, match=r"192\.0\.2\.7 is not among the addresses"):
        server_launch(folder, BASE, host="192.0.2.7")


def test_the_node_says_who_it_is(tmp_path: Path) -> None:
    folder = make_fleet(tmp_path / "fleet", "pi0")
    add_node(
        folder,
        "pi0",
        {"deadline": 60.0, "threads": 2, "data-root": "/my data", "runtime-port": 9111},
    )
    launch = node_launch(folder.node("pi0"), BASE)
    command = launch.command
    assert Path(command[0]).name == "flower-supernode"
    assert after(command, "--superlink") == "127.0.0.1:8000"
    assert after(command, "--root-certificates") == str(folder.node("pi0").ca)
    assert after(command, "--auth-supernode-private-key") == str(folder.node("pi0").key)
    assert after(command, "--host") == "127.0.0.1"
    assert (after(command, "--port"), launch.port) == ("9111", 9111)
    assert parse_config_args([after(command, "--node-config")]) == {
        "partition-id": 0, "deadline": 60.0, "threads": 2, "data-root": "/my data",
        "state-dir": str(folder.node("pi0").root / "state"), "node-name": "pi0",
    }  # fmt: skip
    assert launch.environment["OMP_NUM_THREADS"] == "2"
    assert launch.environment["FLWR_HOME"] == str(folder.node("pi0").root / "state" / "flower")


def test_relative_folders_are_those_of_who_named_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = make_fleet(tmp_path / "fleet", "pi0", "pi1")
    # The node works in a folder of its own, where neither would mean anything.
    add_node(folder, "pi0", {"stream-state-dir": "stream", "data-root": "data"})
    own = folder.node("pi0").root

    def told(name: str, data_root: str | None = None, **base: str) -> dict[str, object]:
        command = node_launch(folder.node(name), BASE | base, data_root=data_root).command
        return parse_config_args([after(command, "--node-config")])

    found = told("pi0", FL_ELASTIC_DATA_ROOT="here")
    assert found["stream-state-dir"] == str(own / "stream")
    assert found["data-root"] == str(own / "data")
    assert told("pi0", "given")["data-root"] == str(tmp_path / "given")
    assert told("pi1", FL_ELASTIC_DATA_ROOT="here")["data-root"] == str(tmp_path / "here")
    assert told("pi1")["data-root"] == "" and "stream-state-dir" not in told("pi1")


def test_nothing_is_made_before_the_start(tmp_path: Path) -> None:
    folder = make_fleet(tmp_path / "fleet", "pi0")
    launch = node_launch(folder.node("pi0"), BASE)
    assert not launch.folder.exists()
    launch.prepare()
    assert launch.folder.is_dir()


def test_where_the_state_goes(tmp_path: Path) -> None:
    node = make_fleet(tmp_path / "fleet", "pi0").node("pi0")

    def state(**more: Path) -> object:
        base = BASE | {"STATE_DIRECTORY": "/var/lib/one:/var/lib/two"}
        command = node_launch(node, base, **more).command  # type: ignore[arg-type]
        return parse_config_args([after(command, "--node-config")])["state-dir"]

    assert state() == "/var/lib/one"
    assert state(state=tmp_path / "given") == str(tmp_path / "given")
    add_node(FleetFolder(tmp_path / "fleet"), "pi0", {"state-dir": "/srv/state"})
    assert state() == "/srv/state"


def test_the_first_address_that_means_something_is_used(tmp_path: Path) -> None:
    folder = make_fleet(tmp_path / "fleet", "pi0")
    text = folder.node("pi0").settings.read_text()
    folder.node("pi0").settings.write_text(text.replace('"127.0.0.1"', '"server.invalid", "::1"'))

    def address(known: str) -> str:
        launch = node_launch(folder.node("pi0"), BASE, resolvable=lambda name: name == known)
        return after(launch.command, "--superlink")

    assert address("server.invalid") == "server.invalid:8000"
    assert address("::1") == "[::1]:8000"
    assert address("neither") == "server.invalid:8000"


def test_a_node_needs_its_key_and_sensible_settings(tmp_path: Path) -> None:
    node = make_fleet(tmp_path / "fleet", "pi0").node("pi0")
    text = node.settings.read_text()
    for setting in ("threads = -1", 'threads = "two"', 'runtime-port = "x"', "runtime-port = 0"):
        node.settings.write_text(f"{text}{setting}\n")
        with pytest.raises(FleetError, match=r"threads|port"):
            node_launch(node, BASE)
    node.settings.write_text(text)
    node_launch(node, BASE)
    node.key.unlink()
    with pytest.raises(FleetError, match=r"node\.key is missing"):
        node_launch(node, BASE)


def test_the_environment_is_quiet_and_goes_round_proxies() -> None:
    base = {"PATH": "/usr/bin", "HTTPS_PROXY": "http://proxy", "no_proxy": "intranet"}
    made = flower_environment(base, Path("/home"), ["server.lan"], threads=3)
    assert made["FLWR_TELEMETRY_ENABLED"] == "0"
    assert made["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert made["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert made["NO_PROXY"] == made["no_proxy"] == "intranet,server.lan,localhost,127.0.0.1,::1"
    assert made["PATH"].split(os.pathsep) == [str(Path(sys.executable).parent), "/usr/bin"]
    assert made["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in flower_environment(base, Path("/home"), [])


def test_a_missing_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Path(command_path("flwr")).is_file()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(FleetError, match="pip install"):
        command_path("flwr")


def test_a_taken_port_is_one_clear_error(tmp_path: Path) -> None:
    import socket

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(FleetError, match=f"127.0.0.1 port {port}.*in use.*--port"):
            check_port_is_free("127.0.0.1", port)
        launch = Launch(("/bin/false",), {}, (tmp_path / "home",), "127.0.0.1", port)
        with pytest.raises(FleetError, match="in use"):
            become(launch)
        node = make_fleet(tmp_path / "fleet", "pi0").node("pi0")
        # Two nodes of one machine.
        with pytest.raises(FleetError, match=f"{port}.*in use.*--runtime-port"):
            become(node_launch(node, {}, runtime_port=port))
    check_port_is_free("127.0.0.1", port)


def test_a_program_that_cannot_be_started_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(serve_module, "check_port_is_free", lambda *given: None)
    launch = Launch((str(tmp_path / "nothing"),), {}, (tmp_path / "home",), "127.0.0.1", 1)
    with pytest.raises(FleetError, match="cannot start"):
        become(launch)


def test_a_node_is_told_what_to_do_if_its_server_refuses_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    node = make_fleet(tmp_path / "fleet", "pi0").node("pi0")
    started: list[str] = []
    monkeypatch.setattr(serve_module, "check_port_is_free", lambda *given: None)
    monkeypatch.setattr(serve_module.os, "chdir", lambda folder: None)
    monkeypatch.setattr(serve_module.os, "execve", lambda path, *given: started.append(path))
    become(node_launch(node, {}))
    told = capsys.readouterr().err
    assert Path(started[0]).name == "flower-supernode"
    assert told.startswith("pi0: ") and told.count("\n") == 1
    assert "Failed to activate" in told and "fl-elastic fleet register" in told


def test_names_that_nobody_knows_are_not_resolved() -> None:
    assert resolves("127.0.0.1") and resolves("localhost")
    assert not resolves("server.invalid") and not resolves("x" * 70 + ".invalid")


def test_arguments_are_pure_functions_of_settings() -> None:
    folder = FleetFolder(Path("/f"))
    assert superlink_arguments(folder, "::", 9000) == superlink_arguments(folder, "::", 9000)
    json.dumps(superlink_arguments(folder, "::", 9000))


def test_a_start_waits_for_neither_torch_nor_flower() -> None:
    script = (
        "import sys, fl_elastic.fleet.provision, fl_elastic.fleet.local, fl_elastic.fleet.doctor\n"
        "print(sorted({'torch', 'flwr', 'numpy'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert found.stdout == "[]\n", found.stdout + found.stderr
