"""The files of a fleet that contain no secret and are derived from its inventory: operator settings and app."""

from __future__ import annotations

from collections.abc import Iterator

from fl_elastic.fleet.change import Change, ensure_file
from fl_elastic.fleet.inventory import Server
from fl_elastic.fleet.layout import FleetFolder
from fl_elastic.fleet.names import address_and_port
from fl_elastic.fleet.private_files import PRIVATE_FILE, make_folder, toml_bytes

CONNECTION = "fleet"
"""Name of the SuperLink in the settings of Flower's commands."""

_PROJECT = {
    "project": {"name": "fl-elastic-fleet", "version": "1.0.0"},
    "tool": {
        "flwr": {
            "app": {
                "publisher": "fl-elastic",
                "components": {
                    "serverapp": "fleet_app:server_app",
                    "clientapp": "fleet_app:client_app",
                },
                # fl-elastic fleet submit --set can only set what is declared here.
                "config": {
                    "scenario": "",
                    "method": "",
                    "seed": 0,
                    "results": "",
                    "data-root": "",
                    "resume": False,
                    "round-timeout": 3600.0,
                    "node-timeout": 120.0,
                },
            }
        }
    },
}

_APP = '''"""The Flower app of this fleet; what it does is part of fl_elastic on server and nodes."""

from fl_elastic_simulations.fleet.app import client_app, server_app

__all__ = ["client_app", "server_app"]
'''


def operator_bytes(folder: FleetFolder, server: Server) -> bytes:
    """Return the settings with which Flower's commands find the SuperLink."""
    ca = folder.ca if folder.ca.is_file() else folder.server_ca
    connection = {
        "address": address_and_port(server.addresses[0], server.port),
        # An absolute path, because Flower resolves a relative one against its home.
        "root-certificates": str(ca.resolve()),
    }
    table = {"superlink": {"default": CONNECTION, CONNECTION: connection}}
    return toml_bytes("How Flower's commands reach this fleet (FLWR_HOME is this folder).", table)


def ensure_operator(folder: FleetFolder, server: Server) -> Iterator[Change]:
    """Write the settings of Flower's commands if they are missing or outdated."""
    if make_folder(folder.operator):
        yield Change("created", folder.operator)
    yield ensure_file(folder.operator_settings, operator_bytes(folder, server), PRIVATE_FILE)


def ensure_app(folder: FleetFolder) -> Iterator[Change]:
    """Write the Flower app of the fleet if it is missing or outdated."""
    if make_folder(folder.app):
        yield Change("created", folder.app)
    project = toml_bytes("Submitted by fl-elastic fleet submit; init writes it again.", _PROJECT)
    yield ensure_file(folder.app / "pyproject.toml", project)
    yield ensure_file(folder.app / "fleet_app.py", _APP.encode())
