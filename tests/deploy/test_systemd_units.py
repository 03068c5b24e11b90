"""The units say what the command line and Flower's ways ask for."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from command_line import COMMAND
from deployed_files import DEPLOY, UNITS, unit_values

from fl_elastic.errors import StreamDataError, StreamError

SERVICES = [path for path in UNITS if path.suffix == ".service"]
LONG = [path for path in SERVICES if "health" not in path.name]
PROGRAM = "/opt/fl-elastic/current/bin/fl-elastic"


def named(path: Path) -> str:
    return path.name


def command_line(path: Path) -> list[str]:
    (line,) = unit_values(path)["Service", "ExecStart"]
    return shlex.split(line)


def test_there_are_units() -> None:
    assert {path.name for path in UNITS} >= {
        "fl-elastic-server.service",
        "fl-elastic-node.service",
        "fl-elastic-stream.service",
        "fl-elastic-exporter@.service",
        "fl-elastic-health@.service",
        "fl-elastic-health@.timer",
    }


@pytest.mark.parametrize("path", LONG, ids=named)
def test_commands_and_options_exist(path: Path) -> None:
    program, *arguments = command_line(path)
    assert program == PROGRAM
    commands = getattr(COMMAND, "commands", {})
    assert {"fleet", "stream"} <= set(commands)
    command = commands.get(arguments[0])
    if arguments[0] == "fleet":
        command = getattr(command, "commands", {}).get(arguments[1])
    command = getattr(command, "commands", {}).get(getattr(command, "usual", ""), command)
    assert command is not None, f"no command {arguments[:2]}"
    known = {option for parameter in command.params for option in parameter.opts}
    used = {argument for argument in arguments if argument.startswith("--")}
    assert used <= known, f"{path.name} uses {sorted(used - known)}"
    required = {
        parameter.opts[0]
        for parameter in command.params
        if parameter.required and parameter.opts[0].startswith("--")
    }
    assert required <= used, f"{path.name} leaves out {sorted(required - used)}"


@pytest.mark.parametrize("path", LONG, ids=named)
def test_variables_of_the_command_line_have_a_value(path: Path) -> None:
    values = unit_values(path)
    given = {
        setting.split("=", 1)[0]
        for line in values["Service", "Environment"]
        for setting in shlex.split(line)
    }
    used = {word[2:-1] for word in command_line(path) if word.startswith("${")}
    assert used <= given


@pytest.mark.parametrize("path", LONG, ids=named)
def test_services_come_back_for_ever(path: Path) -> None:
    values = unit_values(path)
    assert values["Service", "Restart"] == ["always"]
    assert values["Unit", "StartLimitIntervalSec"] == ["0"]
    wanted_by = "fl-elastic-%i.service" if "exporter" in path.name else "multi-user.target"
    assert values["Install", "WantedBy"] == [wanted_by]


def test_the_server_can_be_reached_from_its_own_machine_alone_unless_told() -> None:
    values = unit_values(DEPLOY / "systemd/fl-elastic-server.service")
    # Unbraced, so that systemd makes words of it; nothing unless somebody says so.
    assert (
        command_line(DEPLOY / "systemd/fl-elastic-server.service")[-1]
        == "$FL_ELASTIC_SERVER_OPTIONS"
    )
    assert "FL_ELASTIC_SERVER_OPTIONS=" in values["Service", "Environment"]
    defaults = yaml.safe_load((DEPLOY / "ansible/roles/fl_elastic/defaults/main.yml").read_text())
    assert defaults["fl_elastic_server_host"] == "127.0.0.1"
    example = yaml.safe_load((DEPLOY / "ansible/inventory/example.yml").read_text())
    (server,) = example["all"]["children"]["server"]["hosts"].values()
    # The port that the gateway's configuration forwards to.
    gateway = (DEPLOY / "gateway/nginx.conf").read_text()
    assert f"127.0.0.1:{server['fl_elastic_server_port']};" in gateway


def test_a_stream_that_no_restart_mends_is_not_started_again() -> None:
    values = unit_values(DEPLOY / "systemd/fl-elastic-stream.service")
    (statuses,) = values["Service", "RestartPreventExitStatus"]
    # 2 is that of options that mean nothing.
    assert set(statuses.split()) == {"2", str(StreamDataError.exit_status)}
    assert "1" not in statuses.split() and StreamError.exit_status == 1


def test_a_node_comes_back_after_flowers_window() -> None:
    values = unit_values(DEPLOY / "systemd/fl-elastic-node.service")
    (seconds,) = values["Service", "RestartSec"]
    assert 60 < int(seconds) <= 90
    # A training that takes too much memory must not take the node with it.
    assert values["Service", "OOMPolicy"] == ["continue"]


@pytest.mark.parametrize("part", ["server", "node"])
def test_the_clock_and_the_network_come_first(part: str) -> None:
    values = unit_values(DEPLOY / f"systemd/fl-elastic-{part}.service")
    for name in ("After", "Wants"):
        assert set(" ".join(values["Unit", name]).split()) == {
            "network-online.target",
            "time-sync.target",
        }


@pytest.mark.parametrize("path", SERVICES, ids=named)
def test_services_are_shut_in(path: Path) -> None:
    values = unit_values(path)
    for name, wanted in {
        "NoNewPrivileges": "yes",
        "ProtectSystem": "strict",
        "ProtectHome": "yes",
        "PrivateTmp": "yes",
        "RestrictNamespaces": "yes",
        "SystemCallArchitectures": "native",
    }.items():
        assert values["Service", name] == [wanted], name
    assert ("Service", "MemoryMax") in values
    assert ("Service", "TasksMax") in values
    assert values["Service", "SystemCallFilter"][0] == "@system-service"


@pytest.mark.parametrize("path", LONG, ids=named)
def test_torch_may_write_machine_code_and_nobody_is_root(path: Path) -> None:
    values = unit_values(path)
    assert ("Service", "MemoryDenyWriteExecute") not in values
    assert values["Service", "User"] == ["fl-elastic"]
    environment = " ".join(values["Service", "Environment"])
    if "exporter" not in path.name:
        assert "FLWR_TELEMETRY_ENABLED=0" in environment
