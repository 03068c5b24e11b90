"""Fleets in folders, for tests."""

from __future__ import annotations

from pathlib import Path

from fl_elastic.fleet.change import Change
from fl_elastic.fleet.layout import FleetFolder
from fl_elastic.fleet.provision import Wanted, provision


def make_fleet(place: Path, *nodes: str, port: int = 8000) -> FleetFolder:
    folder = FleetFolder(place)
    provision(folder, Wanted(("127.0.0.1",), port, nodes))
    return folder


def content(place: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {
        str(path.relative_to(place)): path.read_bytes()
        for path in sorted(place.rglob("*"))
        if path.is_file()
    }


def done(changes: list[Change], *what: str) -> dict[str, str]:
    """Files by name for which this was done, with the reason."""
    return {change.path.name: change.why for change in changes if change.what in what}
