"""Register and unregister keys at the SuperLink, so that it accepts exactly those of the inventory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from fl_elastic.errors import FleetError
from fl_elastic.fleet.flower_cli import AlreadyRegistered, FlowerCommands, ServerUnreachable
from fl_elastic.fleet.inventory import Inventory, Node, load_inventory, save_inventory
from fl_elastic.fleet.layout import FleetFolder
from fl_elastic.fleet.node_key import fingerprint
from fl_elastic.fleet.private_files import locked

GONE = "unregistered"


@dataclass(frozen=True)
class Registration:
    """Result of the registration of one node.

    Parameters
    ----------
    name : str
        The node.
    what : {"registered", "known", "unregistered", "refused"}
        ``known``: there was nothing to do.
    node_id : str, optional
        Id of the node at the SuperLink.
    why : str
        Explanation; empty if none is needed.
    """

    name: str
    what: str
    node_id: str | None = None
    why: str = ""


def register(folder: FleetFolder, registry: FlowerCommands) -> list[Registration]:
    """Register all keys of the inventory that the SuperLink does not know, and unregister revoked ones.

    If one node cannot be registered, the others still are.

    Raises
    ------
    FleetError
        If the SuperLink does not answer, or the inventory cannot be written.
    """
    load_inventory(folder.inventory)
    done: list[Registration] = []
    with locked(folder.root):
        inventory = load_inventory(folder.inventory)
        alive = {state.node_id for state in registry.nodes() if state.status != GONE}
        for node in inventory.nodes:
            for changed, what in _one(folder, inventory, node, registry, alive):
                # Saved after every step, so that a crash does not lose registrations at the SuperLink.
                inventory = inventory.with_node(changed)
                save_inventory(folder.inventory, inventory)
                done.append(what)
    return done


def _one(
    folder: FleetFolder, inventory: Inventory, node: Node, registry: FlowerCommands, alive: set[str]
) -> Iterator[tuple[Node, Registration]]:
    gone = node.retired if not node.revoked or not node.node_id else (*node.retired, node.node_id)
    for node_id in gone:
        if node_id in alive:
            registry.unregister(node_id)
        yield node, Registration(node.name, "unregistered", node_id)
    node = replace(node, retired=(), node_id=None if node.revoked else node.node_id)
    if node.revoked:
        yield node, Registration(node.name, "refused", why="revoked")
        return
    if node.node_id in alive:
        yield node, Registration(node.name, "known", node.node_id)
        return
    public_key = folder.node(node.name).public_key
    try:
        if fingerprint(public_key) in inventory.revoked_keys:
            raise FleetError(
                f"its key was revoked; give it a new one with: fl-elastic fleet rotate DIR {node.name}"
            )
        node_id = _register(public_key, node, inventory, registry, alive)
    except ServerUnreachable:
        raise
    except FleetError as error:
        yield replace(node, node_id=None), Registration(node.name, "refused", why=str(error))
        return
    yield replace(node, node_id=node_id), Registration(node.name, "registered", node_id)


def _register(
    public_key: Path, node: Node, inventory: Inventory, registry: FlowerCommands, alive: set[str]
) -> str:
    try:
        return registry.register(public_key, node.name)
    except AlreadyRegistered as error:
        # The key was registered by a command that ended before it could save the id. Flower lists neither names nor
        # keys, so the id is only known if there is exactly one that no other node of the inventory has.
        unlisted = alive - {other.node_id for other in inventory.nodes}
        if len(unlisted) == 1:
            return unlisted.pop()
        raise FleetError(
            "the server knows its key under an id that is not in fleet.toml, or has unregistered it; "
            f"give it a new key with: fl-elastic fleet rotate DIR {node.name}"
        ) from error
