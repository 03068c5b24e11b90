"""What a fleet is made of: ``fleet.toml``, one frozen value in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fl_elastic.errors import FleetError
from fl_elastic.fleet.files import PUBLIC_FILE, read_toml, toml_bytes, write_if_changed
from fl_elastic.fleet.names import Scalar, check_address, check_name, check_port
from fl_elastic.fleet.tables import as_scalars, as_table, as_text, as_truth, list_at
from fl_elastic.registry import closest

__all__ = [
    "Inventory",
    "Node",
    "Server",
    "load_inventory",
    "next_partition",
    "read_server",
    "save_inventory",
    "server_table",
]

_VERSION = 1
_COMMENT = """The nodes and the server of this fleet; the commands of fl-elastic fleet keep it up to date.
Settings below node.config may be changed here: fl-elastic fleet init writes them into nodes/NAME/node.toml."""
_REMEDY = "restore it from a backup; the keys beside it are not lost"


@dataclass(frozen=True)
class Server:
    """Where the server is, and whether the fleet goes without TLS and keys.

    Parameters
    ----------
    addresses : tuple of str
        Host names and IP addresses by which nodes reach it, the preferred one first.
    port : int
        The one port of everything.
    insecure : bool
        No TLS, no keys: anyone on the network can read, join and command.
    """

    addresses: tuple[str, ...]
    port: int = 8000
    insecure: bool = False


@dataclass(frozen=True)
class Node:
    """One node.

    Parameters
    ----------
    name : str
        Also the name of its folder.
    fingerprint : str
        Of its public key; empty in an insecure fleet.
    node_id : str, optional
        What the SuperLink calls it, once registered.
    retired : tuple of str
        Ids of its former keys, which the SuperLink has to be told to forget.
    revoked : bool
        Whether its key is no longer wanted.
    config : mapping of str to bool, int, float or str
        Its settings: ``partition-id``, ``threads``, ``deadline`` ...
    """

    name: str
    fingerprint: str = ""
    node_id: str | None = None
    retired: tuple[str, ...] = ()
    revoked: bool = False
    config: Mapping[str, Scalar] = field(default_factory=dict)

    def without_registration(self) -> Node:
        """Return the node with its registration among the retired ones."""
        retired = (*self.retired, self.node_id) if self.node_id else self.retired
        return replace(self, node_id=None, retired=retired)


@dataclass(frozen=True)
class Inventory:
    """A fleet.

    Parameters
    ----------
    server : Server
        Where its server is.
    nodes : tuple of Node
        In the order in which they were added.
    revoked_keys : tuple of str
        Fingerprints that are never registered again, whoever shows up with them.

    Examples
    --------
    >>> Inventory(Server(("server.lan",)), (Node("pi0"),)).node("pi0").revoked
    False
    """

    server: Server
    nodes: tuple[Node, ...] = ()
    revoked_keys: tuple[str, ...] = ()

    def has(self, name: str) -> bool:
        """Whether there is a node of that name."""
        return any(node.name == name for node in self.nodes)

    def node(self, name: str) -> Node:
        """Return the node of that name.

        Raises
        ------
        FleetError
            If there is none.
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
        """Return the fleet with a node put in place of the one of its name, or added."""
        if not self.has(node.name):
            return replace(self, nodes=(*self.nodes, node))
        nodes = tuple(node if old.name == node.name else old for old in self.nodes)
        return replace(self, nodes=nodes)

    def with_revoked_key(self, fingerprint: str) -> Inventory:
        """Return the fleet with one more key that is never registered again."""
        if not fingerprint or fingerprint in self.revoked_keys:
            return self
        return replace(self, revoked_keys=(*self.revoked_keys, fingerprint))


def next_partition(inventory: Inventory) -> int:
    """Return the smallest partition that no node has."""
    taken = {node.config.get("partition-id") for node in inventory.nodes}
    return next(number for number in range(len(taken) + 1) if number not in taken)


def load_inventory(path: Path) -> Inventory:
    """Read ``fleet.toml``.

    Raises
    ------
    FleetError
        If it is missing, damaged or says something that means nothing.
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
    return _checked(path, lambda: _inventory(table))


def save_inventory(path: Path, inventory: Inventory) -> bool:
    """Write ``fleet.toml`` and return whether it said something else before.

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
    return {
        "addresses": list(server.addresses),
        "port": server.port,
        "insecure": server.insecure,
    }


def read_server(table: object) -> Server:
    """Read what `server_table` wrote.

    Raises
    ------
    FleetError, KeyError, TypeError
        If something is missing or means nothing.
    """
    server = as_table(table, "server")
    addresses = tuple(check_address(as_text(a, "address")) for a in list_at(server, "addresses"))
    if not addresses:
        raise FleetError("server.addresses is empty; expected at least one address")
    insecure = as_truth(server.get("insecure", False), "server.insecure")
    return Server(addresses, check_port(server["port"]), insecure)


def _inventory(table: dict[str, Any]) -> Inventory:
    nodes = tuple(_node(entry) for entry in list_at(table, "node"))
    names = [node.name for node in nodes]
    if len(set(names)) < len(names):
        raise FleetError("two nodes have the same name")
    revoked = tuple(as_text(key, "revoked-keys") for key in list_at(table, "revoked-keys"))
    return Inventory(read_server(table["server"]), nodes, revoked)


def _node(entry: object) -> Node:
    table = as_table(entry, "node")
    name = check_name(as_text(table["name"], "node.name"))
    node_id = table.get("node-id")
    return Node(
        name=name,
        fingerprint=as_text(table.get("fingerprint", ""), f"fingerprint of {name}"),
        node_id=None if node_id is None else _id(node_id, name),
        retired=tuple(_id(entry, name) for entry in list_at(table, "retired")),
        revoked=as_truth(table.get("revoked", False), f"revoked of {name}"),
        config=as_scalars(table.get("config", {}), f"config of {name}"),
    )


def _node_table(node: Node) -> dict[str, Any]:
    table: dict[str, Any] = {
        "name": node.name,
        "fingerprint": node.fingerprint,
        "revoked": node.revoked,
        "retired": list(node.retired),
        "config": dict(node.config),
    }
    # A number of 64 bits without a sign does not fit into TOML's integers.
    return table if node.node_id is None else table | {"node-id": node.node_id}


def _checked(path: Path, read: Callable[[], Inventory]) -> Inventory:
    try:
        return read()
    except KeyError as error:
        raise FleetError(f"{path}: {error.args[0]} is missing; {_REMEDY}") from error
    except FleetError as error:
        raise FleetError(f"{path}: {error}") from error
    except RecursionError:
        raise FleetError(f"{path}: a value is nested too deeply; {_REMEDY}") from None


def _id(value: object, name: str) -> str:
    # It becomes an argument of Flower's commands, so it must not look like an option.
    if not isinstance(value, str) or not value.isdecimal():
        raise FleetError(f"node {name}: id {value!r}; expected digits in quotes")
    return value
