"""The settings of one device: ``node.toml`` in its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Gt, Le
from pydantic import Field

from fl_elastic.errors import FleetError
from fl_elastic.fleet.inventory import Config, Name, Node, Server, checked, server_table
from fl_elastic.fleet.private_files import read_toml, toml_bytes
from fl_elastic.registry import closest
from fl_elastic.settings import Number, Scalar, Text, Truth, Whole, keys_of, read_settings

_COMMENT = """Where this node's server is, and its own settings. Made from fleet.toml by fl-elastic fleet init:
change config there, run init again and copy this folder to the device."""
_REMEDY = "copy the node's folder from the fleet's folder again"
_OF_AN_APP = "app-"


_Natural = Annotated[Whole, Ge(0), Le(2**31)]


@dataclass(frozen=True)
class _Known:
    """A node's settings, as `NodeConfig` reads them; names of a custom app's settings begin with ``app-``."""

    partition: Annotated[_Natural, Field(alias="partition-id")] = 0
    partitions: Annotated[_Natural, Field(alias="num-partitions")] = 0
    threads: _Natural = 0
    runtime_port: Annotated[Whole | None, Ge(1), Le(65535), Field(alias="runtime-port")] = None
    deadline: Annotated[Number, Gt(0)] | None = None
    speedup: Annotated[Number, Ge(1)] | None = None
    state_dir: Annotated[Text, Field(alias="state-dir")] = "state"
    data_root: Annotated[Text | None, Field(alias="data-root")] = None
    least_battery: Annotated[Number, Ge(0), Le(1), Field(alias="least-battery")] = 0.0
    mains_only: Annotated[Truth, Field(alias="mains-only")] = False
    stream_dir: Annotated[Text | None, Field(alias="stream-state-dir")] = None
    joining: Text = "measured"


@dataclass(frozen=True)
class NodeSettings:
    """The settings of one device.

    Parameters
    ----------
    server : Server
        The fleet's server.
    name : str
        Name of the node.
    config : mapping of str to bool, int, float or str
        ``partition-id``, ``threads``, ``deadline``, ``data-root``, ``state-dir`` ...
    """

    server: Server
    name: str
    config: Config = field(default_factory=dict)


def node_settings_bytes(server: Server, node: Node) -> bytes:
    """Return the content of a node's ``node.toml``."""
    table = {
        "server": server_table(server),
        "node": {"name": node.name, "config": dict(node.config)},
    }
    return toml_bytes(_COMMENT, table)


def load_node_settings(path: Path) -> NodeSettings:
    """Read a node's ``node.toml``.

    Raises
    ------
    FleetError
        If it is missing, damaged or has an invalid entry.
    """
    if not path.is_file():
        raise FleetError(
            f"no node in {path.parent}: {path.name} is missing; "
            "give the folder nodes/NAME that fl-elastic fleet init made"
        )
    found = checked(_File, read_toml(path, _REMEDY), path, _REMEDY)
    return NodeSettings(found.server, found.node.name, found.node.config)


@dataclass(frozen=True)
class _Node:
    name: Name
    config: Config = field(default_factory=dict)


@dataclass(frozen=True)
class _File:
    server: Server
    node: _Node


def check_settings(name: str, config: Mapping[str, Scalar]) -> None:
    """Check that each setting of a node is known and has a valid value.

    Raises
    ------
    FleetError
        If a setting is unknown or invalid; the message lists all problems.
    """
    known = list(keys_of(_Known))
    for key in config:
        if key not in known and not key.startswith(_OF_AN_APP):
            raise FleetError(
                f"node {name}: unknown setting {key!r}{closest(key, known)}: known are {', '.join(sorted(known))}; "
                f"one that an app of your own reads begins with {_OF_AN_APP}, as in {_OF_AN_APP}{key}"
            )
    problems: list[str] = []
    if (
        read_settings(_Known, {k: v for k, v in config.items() if k in known}, problems, name)
        is None
    ):
        raise FleetError(f"node {'; '.join(problems)}")
