"""What one device has to know: ``node.toml`` in its folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fl_elastic.errors import FleetError
from fl_elastic.fleet.files import read_toml, toml_bytes
from fl_elastic.fleet.inventory import Config, Name, Node, Server, checked, server_table

__all__ = ["NodeSettings", "load_node_settings", "node_settings_bytes"]

_COMMENT = """Where this node's server is, and its own settings. Made from fleet.toml by fl-elastic fleet init:
change config there, run init again and copy this folder to the device."""
_REMEDY = "copy the node's folder from the fleet's folder again"


@dataclass(frozen=True)
class NodeSettings:
    """The settings of one device.

    Parameters
    ----------
    server : Server
        Where its server is.
    name : str
        What it is called in the fleet.
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
        If it is missing, damaged or says something that means nothing.
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
