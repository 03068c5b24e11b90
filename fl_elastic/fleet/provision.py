"""``fl-elastic fleet init``: create missing files of a fleet, keep valid ones, and repair others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from fl_elastic.errors import FleetError
from fl_elastic.fleet.certificates import authority_certificate, ensure_authority, ensure_server
from fl_elastic.fleet.change import Change, ensure_file
from fl_elastic.fleet.inventory import (
    Inventory,
    Node,
    Server,
    load_inventory,
    next_partition,
    save_inventory,
)
from fl_elastic.fleet.layout import FleetFolder, NodeFolder
from fl_elastic.fleet.names import check_address, check_name, check_port
from fl_elastic.fleet.node_key import fingerprint, new_node_key, public_part
from fl_elastic.fleet.node_settings import check_settings, node_settings_bytes
from fl_elastic.fleet.operator_files import ensure_app, ensure_operator
from fl_elastic.fleet.private_files import (
    PRIVATE_FILE,
    PRIVATE_FOLDER,
    PUBLIC_FILE,
    locked,
    make_folder,
    mend_mode,
    mode_of,
    write_file,
)

_PORT = 8000


@dataclass(frozen=True)
class Wanted:
    """The user's settings for a fleet; anything not given stays unchanged.

    Parameters
    ----------
    addresses : sequence of str
        Addresses of the server.
    port : int, optional
        Port of the server; 8000 in a new fleet.
    nodes : sequence of str
        Nodes to add if they are missing.
    """

    addresses: Sequence[str] = ()
    port: int | None = None
    nodes: Sequence[str] = ()


def numbered(count: int) -> tuple[str, ...]:
    """Return names for ``count`` nodes.

    >>> numbered(2)
    ('node0', 'node1')
    """
    return tuple(f"node{number}" for number in range(count))


def provision(
    folder: FleetFolder, wanted: Wanted, now: Callable[[], datetime] = lambda: datetime.now(UTC)
) -> list[Change]:
    """Make a fleet, or bring the one in ``folder`` up to date; return the changes.

    Existing keys and valid certificates stay unchanged, byte for byte; no key is ever replaced.

    Raises
    ------
    FleetError
        If a name or an address is invalid, a file is damaged, or the folder cannot be written.
    """
    inventory = _wanted_inventory(folder, wanted)
    changes = [Change("created", folder.root)] if make_folder(folder.root) else []
    with locked(folder.root):
        # Computed again under the lock: another process may have changed the fleet meanwhile.
        inventory = _wanted_inventory(folder, wanted)
        changes += _mended(folder)
        changes += ensure_authority(folder, now())
        changes += ensure_server(folder, inventory.server, now())
        if make_folder(folder.nodes):
            changes.append(Change("created", folder.nodes))
        for node in inventory.nodes:
            made, done = ensure_node(folder, inventory.server, node)
            changes += done
            inventory = inventory.with_node(made)
        changes += ensure_operator(folder, inventory.server)
        changes += ensure_app(folder)
        missing = not folder.inventory.is_file()
        if save_inventory(folder.inventory, inventory):
            changes.append(Change("created" if missing else "updated", folder.inventory))
    return changes


def ensure_node(folder: FleetFolder, server: Server, node: Node) -> tuple[Node, list[Change]]:
    """Make or repair the folder of a node; return the node with its key's fingerprint, and the changes.

    Raises
    ------
    FleetError
        If a setting is invalid, or a file is damaged or cannot be written.
    """
    check_settings(node.name, node.config)
    place = folder.node(node.name)
    changes = [Change("created", place.root)] if make_folder(place.root) else []
    changes += _ensure_key(place, node)
    changes.append(ensure_file(place.ca, authority_certificate(folder)))
    found = fingerprint(place.public_key)
    if node.fingerprint and found != node.fingerprint:
        # The key was replaced by hand; the registration belongs to the old one.
        node = node.without_registration()
        changes.append(Change("repaired", folder.inventory, f"{node.name} has another key"))
    node = replace(node, fingerprint=found)
    changes.append(ensure_file(place.settings, node_settings_bytes(server, node)))
    return node, changes


def _ensure_key(place: NodeFolder, node: Node) -> Iterator[Change]:
    if place.key.is_file():
        yield Change("kept", place.key)
        yield ensure_file(place.public_key, public_part(place.key, node.name))
    elif place.public_key.is_file():
        yield Change("kept", place.key, "not here: on the device only")
    elif node.fingerprint:
        raise FleetError(
            f"both {place.key} and {place.public_key.name} are missing; restore one of them, "
            f"or make a new key with: fl-elastic fleet rotate DIR {node.name}"
        )
    else:
        key = new_node_key(node.name)
        write_file(place.key, key.private, PRIVATE_FILE)
        write_file(place.public_key, key.public, PUBLIC_FILE)
        yield Change("created", place.key)


def _wanted_inventory(folder: FleetFolder, wanted: Wanted) -> Inventory:
    """Return the existing inventory, or a new one, changed as wanted."""
    addresses = tuple(dict.fromkeys(check_address(address) for address in wanted.addresses))
    if folder.inventory.exists():
        inventory = load_inventory(folder.inventory)
    elif not addresses:
        raise FleetError(
            f"no fleet in {folder.root} yet: say where its server will be with --server-address, "
            "as in --server-address server.lan --server-address 10.0.0.5"
        )
    elif folder.nodes.is_dir() and any(folder.nodes.iterdir()):
        raise FleetError(
            f"{folder.inventory} is missing although {folder.nodes} has nodes; "
            "restore it from a backup, or take another folder for a new fleet"
        )
    else:
        inventory = Inventory(Server(addresses, _PORT))
    server = inventory.server
    if addresses:
        server = replace(server, addresses=addresses)
    if wanted.port is not None:
        server = replace(server, port=check_port(wanted.port))
    inventory = replace(inventory, server=server)
    for name in map(check_name, wanted.nodes):
        if not inventory.has(name):
            node = Node(name, config={"partition-id": next_partition(inventory)})
            inventory = inventory.with_node(node)
    return inventory


def _mended(folder: FleetFolder) -> Iterator[Change]:
    """Remove permissions with which others could read a secret."""
    nodes = [folder.node(path.name) for path in sorted(folder.nodes.glob("*")) if path.is_dir()]
    folders = [folder.authority, folder.server, folder.nodes, folder.operator]
    files = [folder.ca_key, folder.server_key, *(node.key for node in nodes)]
    wanted = {path: PRIVATE_FOLDER for path in (*folders, *(node.root for node in nodes))}
    wanted |= dict.fromkeys(files, PRIVATE_FILE)
    for path, mode in wanted.items():
        if path.exists():
            before = mode_of(path)
            if mend_mode(path, mode):
                yield Change(
                    "repaired", path, f"permissions {before:o} let others in; now {mode_of(path):o}"
                )
