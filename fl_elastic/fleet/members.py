"""Add, revoke and rotate nodes, and change their settings, in a fleet's files; `register` updates the SuperLink."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime

from fl_elastic.errors import FleetError
from fl_elastic.fleet.certificates import renew_server
from fl_elastic.fleet.change import Change
from fl_elastic.fleet.inventory import (
    Inventory,
    Node,
    load_inventory,
    next_partition,
    save_inventory,
)
from fl_elastic.fleet.layout import FleetFolder
from fl_elastic.fleet.names import check_name
from fl_elastic.fleet.node_key import fingerprint, new_node_key
from fl_elastic.fleet.node_settings import check_settings
from fl_elastic.fleet.private_files import (
    PRIVATE_FILE,
    PUBLIC_FILE,
    locked,
    make_folder,
    write_file,
)
from fl_elastic.fleet.provision import ensure_node
from fl_elastic.settings import Scalar


def add_node(folder: FleetFolder, name: str, config: Mapping[str, Scalar]) -> list[Change]:
    """Add a node, or change the settings of an existing one.

    Raises
    ------
    FleetError
        If the name or a setting is invalid, the node is revoked, or its folder cannot be written.
    """
    check_name(name)
    load_inventory(folder.inventory)
    with locked(folder.root):
        inventory = load_inventory(folder.inventory)
        if inventory.has(name):
            node = inventory.node(name)
        else:
            node = Node(name, config={"partition-id": next_partition(inventory)})
        if node.revoked:
            raise FleetError(
                f"node {name} is revoked; give it a new key with: fl-elastic fleet rotate DIR {name}"
            )
        node = replace(node, config={**node.config, **config})
        check_config(name, node.config, inventory)
        node, changes = ensure_node(folder, inventory.server, node)
        if save_inventory(folder.inventory, inventory.with_node(node)):
            changes.append(Change("updated", folder.inventory))
    return changes


def revoke_node(folder: FleetFolder, name: str) -> Node:
    """Mark a node as revoked and return it; call `register` to update the SuperLink.

    Its key stays in its folder, as a record, and is never registered again.

    Raises
    ------
    FleetError
        If there is no such node.
    """
    load_inventory(folder.inventory)
    with locked(folder.root):
        inventory = load_inventory(folder.inventory)
        node = inventory.node(name)
        revoked = replace(node.without_registration(), revoked=True)
        inventory = inventory.with_node(revoked).with_revoked_key(node.fingerprint)
        save_inventory(folder.inventory, inventory)
    return revoked


def rotate_node(folder: FleetFolder, name: str) -> list[Change]:
    """Give a node a new key; call `register` to update the SuperLink.

    The old key is deleted here and never registered again. A revoked node is accepted again.

    Raises
    ------
    FleetError
        If there is no such node, or a file cannot be written.
    """
    load_inventory(folder.inventory)
    with locked(folder.root):
        inventory = load_inventory(folder.inventory)
        node = inventory.node(name)
        place, key = folder.node(name), new_node_key(name)
        make_folder(place.root)
        # Write the public key first: if the process ends before the private key is written, the next rotation
        # repeats both.
        write_file(place.public_key, key.public, PUBLIC_FILE)
        write_file(place.key, key.private, PRIVATE_FILE)
        changes = [Change("updated", place.key, "a new key: copy the folder to the device")]
        fresh = replace(
            node.without_registration(), revoked=False, fingerprint=fingerprint(place.public_key)
        )
        fresh, done = ensure_node(folder, inventory.server, fresh)
        changes += [change for change in done if change.what != "kept"]
        inventory = inventory.with_node(fresh).with_revoked_key(node.fingerprint)
        save_inventory(folder.inventory, inventory)
        changes.append(Change("updated", folder.inventory))
    return changes


def rotate_server(folder: FleetFolder, now: datetime) -> list[Change]:
    """Give the server a new key, and a certificate by the same authority.

    Raises
    ------
    FleetError
        If the authority's key is missing, or a file cannot be written.
    """
    inventory = load_inventory(folder.inventory)
    with locked(folder.root):
        return list(renew_server(folder, inventory.server, now))


def check_config(name: str, config: Mapping[str, Scalar], inventory: Inventory) -> None:
    """Check a node's settings, also against those of the other nodes.

    Parameters
    ----------
    name : str
        The node.
    config : mapping of str to bool, int, float or str
        All settings of the node.
    inventory : Inventory
        The fleet; no two of its nodes may have the same partition.

    Raises
    ------
    FleetError
        If a setting is unknown, a value is invalid, or another node has the partition.
    """
    check_settings(name, config)
    for other in inventory.nodes:
        same = other.config.get("partition-id") == config.get("partition-id")
        if same and other.name != name and not other.revoked:
            raise FleetError(
                f"partition-id={config.get('partition-id')} of node {name}: {other.name} has it; "
                "give one of them another"
            )
