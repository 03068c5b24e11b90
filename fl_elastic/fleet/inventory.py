"""The inventory of a fleet: the file ``fleet.toml``, and frozen dataclasses in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, Strict

from fl_elastic.errors import FleetError
from fl_elastic.fleet.names import check_address, check_name, check_port
from fl_elastic.fleet.private_files import PUBLIC_FILE, read_toml, toml_bytes, write_if_changed
from fl_elastic.registry import closest
from fl_elastic.settings import Scalar, Text, Truth, Whole, approved, read_settings

T = TypeVar("T")
_VERSION = 1
_COMMENT = """The nodes and the server of this fleet; the commands of fl-elastic fleet keep it up to date.
Settings below node.config may be changed here: fl-elastic fleet init writes them into nodes/NAME/node.toml."""
_REMEDY = "restore it from a backup; the keys beside it are not lost"


def _some(addresses: tuple[str, ...]) -> None:
    if not addresses:
        raise FleetError("empty; expected at least one address")


def _id(value: str) -> None:
    # The id becomes an argument of Flower's commands, so it must not look like an option.
    if not value.isdecimal():
        raise FleetError(f"id {value!r}; expected digits in quotes")


def _unlike(nodes: tuple[Node, ...]) -> None:
    names = [node.name for node in nodes]
    if len(set(names)) < len(names):
        raise FleetError("two nodes have the same name")


_NodeId = Annotated[str, Strict(), approved(_id)]
Name = Annotated[Text, approved(check_name)]
"""Name of a node."""
Config = Mapping[str, Scalar]
"""Settings of a node by name."""


@dataclass(frozen=True)
class Server:
    """The server of a fleet.

    Parameters
    ----------
    addresses : tuple of str
        Host names and IP addresses by which nodes reach it, the preferred one first.
    port : int
        The only port that nodes and users need.
    """

    addresses: Annotated[tuple[Annotated[Text, approved(check_address)], ...], approved(_some)]
    port: Annotated[Whole, approved(check_port)]


@dataclass(frozen=True)
class Node:
    """One node of a fleet.

    Parameters
    ----------
    name : str
        Name of the node and of its folder.
    fingerprint : str
        Fingerprint of its public key.
    node_id : str, optional
        Id of the node at the SuperLink, if it is registered.
    retired : tuple of str
        Ids of its former keys, which still have to be unregistered at the SuperLink.
    revoked : bool
        Whether its key is no longer accepted.
    config : mapping of str to bool, int, float or str
        Its settings: ``partition-id``, ``threads``, ``deadline`` ...
    """

    name: Name
    fingerprint: Annotated[str, Strict()] = ""
    node_id: Annotated[_NodeId | None, Field(alias="node-id")] = None
    retired: tuple[_NodeId, ...] = ()
    revoked: Truth = False
    config: Config = field(default_factory=dict)

    def without_registration(self) -> Node:
        """Return the node without a registration, and with its former id among the retired ones."""
        retired = (*self.retired, self.node_id) if self.node_id else self.retired
        return replace(self, node_id=None, retired=retired)


@dataclass(frozen=True)
class Inventory:
    """The server, nodes and revoked keys of a fleet.

    Parameters
    ----------
    server : Server
        The server.
    nodes : tuple of Node
        Nodes in the order in which they were added.
    revoked_keys : tuple of str
        Fingerprints of keys that are never registered again, for any node.

    Examples
    --------
    >>> Inventory(Server(("server.lan",), 8000), (Node("pi0"),)).node("pi0").revoked
    False
    """

    server: Server
    nodes: Annotated[tuple[Node, ...], approved(_unlike), Field(alias="node")] = ()
    revoked_keys: Annotated[tuple[Text, ...], Field(alias="revoked-keys")] = ()

    def has(self, name: str) -> bool:
        """Return whether there is a node of that name."""
        return any(node.name == name for node in self.nodes)

    def node(self, name: str) -> Node:
        """Return the node of that name.

        Raises
        ------
        FleetError
            If there is no such node.
        """
        for node in self.nodes:
            if node.name == name:
                return node
        names = [node.name for node in self.nodes]
        raise FleetError(
            f"no node {name!r} in this fleet{closest(name, names)}; "
            f"known: {', '.join(names) or 'none'}; add it with: fl-elastic fleet add DIR {name}"
        )

    def with_node(self, node: Node) -> Inventory:
        """Return the inventory with a node added; it replaces a node of the same name."""
        if not self.has(node.name):
            return replace(self, nodes=(*self.nodes, node))
        nodes = tuple(node if old.name == node.name else old for old in self.nodes)
        return replace(self, nodes=nodes)

    def with_revoked_key(self, fingerprint: str) -> Inventory:
        """Return the inventory with one more revoked key, which is never registered again."""
        if not fingerprint or fingerprint in self.revoked_keys:
            return self
        return replace(self, revoked_keys=(*self.revoked_keys, fingerprint))


def next_partition(inventory: Inventory) -> int:
    """Return the smallest partition id that no node has."""
    taken = {node.config.get("partition-id") for node in inventory.nodes}
    return next(number for number in range(len(taken) + 1) if number not in taken)


def load_inventory(path: Path) -> Inventory:
    """Read ``fleet.toml``.

    Raises
    ------
    FleetError
        If it is missing, damaged or has an invalid entry.
    """
    if not path.is_file():
        raise FleetError(
            f"no fleet in {path.parent}: {path.name} is missing; "
            f"make one with: fl-elastic fleet init {path.parent} --server-address HOST"
        )
    table = read_toml(path, _REMEDY)
    version = table.get("version")
    if version != _VERSION:
        raise FleetError(f"{path}: version {version!r}, expected {_VERSION}; {_REMEDY}")
    return checked(
        Inventory, {key: value for key, value in table.items() if key != "version"}, path, _REMEDY
    )


def checked(kind: type[T], table: object, path: Path, remedy: str) -> T:
    """Return the content of a file as a dataclass.

    Raises
    ------
    FleetError
        If an entry is invalid; the message ends with ``remedy``.
    """
    problems: list[str] = []
    try:
        found = read_settings(kind, table, problems)
    except RecursionError:
        raise FleetError(f"{path}: a value is nested too deeply; {remedy}") from None
    if found is None:
        raise FleetError(f"{path}: {'; '.join(problems)}; {remedy}")
    return found


def save_inventory(path: Path, inventory: Inventory) -> bool:
    """Write ``fleet.toml`` and return whether its content has changed.

    Raises
    ------
    FleetError
        If it cannot be written.
    """
    table: dict[str, Any] = {
        "version": _VERSION,
        "revoked-keys": list(inventory.revoked_keys),
        "server": server_table(inventory.server),
        "node": [_node_table(node) for node in inventory.nodes],
    }
    return write_if_changed(path, toml_bytes(_COMMENT, table), PUBLIC_FILE)


def server_table(server: Server) -> dict[str, Any]:
    """Return the server as a table of a TOML file."""
    return {"addresses": list(server.addresses), "port": server.port}


def _node_table(node: Node) -> dict[str, Any]:
    table: dict[str, Any] = {
        "name": node.name,
        "fingerprint": node.fingerprint,
        "revoked": node.revoked,
        "retired": list(node.retired),
        "config": dict(node.config),
    }
    # As text, because an unsigned 64-bit number does not fit into TOML's integers.
    return table if node.node_id is None else table | {"node-id": node.node_id}
