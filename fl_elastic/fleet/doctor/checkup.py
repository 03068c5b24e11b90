"""All checks that apply to the folder for which the doctor is called."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from fl_elastic.devices.platform import disk_free_bytes, memory
from fl_elastic.devices.vitals import throttling
from fl_elastic.errors import FleetError
from fl_elastic.fleet.doctor.finding import Finding, Status, fail, ok
from fl_elastic.fleet.doctor.machine import (
    check_disk,
    check_heat,
    check_memory,
    check_swap,
    check_torch,
    torch_build,
)
from fl_elastic.fleet.doctor.trust import (
    check_addresses,
    check_clock,
    check_dates,
    check_names,
    check_node_key,
    check_pair,
    check_permissions,
    check_server,
    check_signer,
)
from fl_elastic.fleet.health import Health, ask_health
from fl_elastic.fleet.inventory import Server, load_inventory
from fl_elastic.fleet.layout import FleetFolder, NodeFolder
from fl_elastic.fleet.node_settings import load_node_settings
from fl_elastic.fleet.serve import resolves, state_folder


@dataclass(frozen=True)
class World:
    """Clock, name resolution and health query that the checks of the network use; tests replace them.

    Parameters
    ----------
    now : callable
        Returns the present time, with a time zone.
    known : callable
        Returns whether an address can be resolved.
    health : callable
        Asks a server for its health.
    """

    now: Callable[[], datetime] = field(default=lambda: datetime.now(UTC))
    known: Callable[[str], bool] = resolves
    health: Callable[[Server, str, Path | None], Health] = ask_health


def check_up(place: Path | None, world: World | None = None) -> list[Finding]:
    """Return the findings about this machine, and about a fleet's or a node's folder.

    Parameters
    ----------
    place : Path, optional
        A fleet's folder (with ``fleet.toml``) or a node's (with ``node.toml``).
    world : World, optional
        Replaces clock and network in tests.

    Raises
    ------
    FleetError
        If the folder has neither file.
    """
    world = world or World()
    if place is None:
        return list(_machine(Path.cwd()))
    fleet, node = FleetFolder(place), NodeFolder(place)
    if fleet.inventory.exists():
        return [*_machine(fleet.server), *_of_fleet(fleet, world)]
    if node.settings.exists():
        return _of_node(node, world)
    raise FleetError(
        f"{place} has neither fleet.toml nor node.toml; give the folder of a fleet or of a node"
    )


def _machine(state: Path) -> Iterator[Finding]:
    found = memory()
    yield check_torch(torch_build(), os.uname().machine)
    yield check_memory(found)
    yield check_swap(found)
    yield check_disk(disk_free_bytes(state), state)
    yield check_heat(throttling())


def _of_fleet(folder: FleetFolder, world: World) -> Iterator[Finding]:
    try:
        inventory = load_inventory(folder.inventory)
    except FleetError as error:
        yield fail("inventory", str(error), "restore fleet.toml from a backup")
        return
    yield ok("inventory", f"{len(inventory.nodes)} nodes")
    server = inventory.server
    now = world.now()
    yield check_dates("authority", folder.server_ca, now, "make a new fleet")
    yield check_dates("server certificate", folder.server_certificate, now)
    yield check_signer(folder)
    yield check_pair(folder)
    yield check_addresses(folder, server.addresses)
    yield check_permissions(_secrets(folder))
    # A missing answer is only a warning, because the server may not have been started yet.
    yield from _network(server, folder.server_ca, world, missing="warn")


def _of_node(folder: NodeFolder, world: World) -> list[Finding]:
    try:
        settings = load_node_settings(folder.settings)
        state = state_folder(folder, settings, os.environ)
    except FleetError as error:
        return [
            *_machine(folder.root),
            fail("settings", str(error), "copy the node's folder again"),
        ]
    found = list(_machine(state))
    remedy = "copy ca.crt from the fleet's folder again"
    found.append(check_dates("authority", folder.ca, world.now(), remedy))
    found.append(check_node_key(folder, settings.name))
    found.append(check_permissions((folder.key,)))
    return found + list(_network(settings.server, folder.ca, world, missing="fail"))


def _network(server: Server, ca: Path, world: World, missing: Status) -> Iterator[Finding]:
    known = [(address, world.known(address)) for address in server.addresses]
    yield check_names(known)
    if not ca.is_file():
        yield fail("server", f"{ca} is missing", "copy it from the fleet's folder")
        return
    answers: Sequence[tuple[str, Health]] = [
        (address, world.health(server, address, ca)) for address, found in known if found
    ]
    yield check_server(server, answers, missing)
    yield check_clock(_dated(server, answers, world), world.now())


def _dated(
    server: Server, answers: Sequence[tuple[str, Health]], world: World
) -> Sequence[tuple[str, Health]]:
    """Return the answers; where the certificate was refused, ask again without checking it, for the server's time.

    A wrong clock makes certificates look invalid.
    """
    return [
        (address, world.health(server, address, None) if health.certificate_error else health)
        for address, health in answers
    ]


def _secrets(folder: FleetFolder) -> list[Path]:
    nodes = [folder.node(path.name) for path in sorted(folder.nodes.glob("*")) if path.is_dir()]
    return [
        folder.authority, folder.ca_key, folder.server, folder.server_key, folder.nodes,
        *(node.key for node in nodes),
    ]  # fmt: skip
