"""What fl-elastic-simulations adds to commands, found by entry points: it may not be installed."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from fl_elastic.errors import LaboratoryMissing

__all__ = ["COMMANDS", "from_laboratory"]

COMMANDS = {
    "simulate": "Simulate a federation of unequal devices and compare methods.",
    "init": "Write a new project: a Flower app with a model, data, and a scenario to simulate.",
    "prepare": "Distil a small backbone on public images, for a fleet to begin with.",
    "bench": "Measure what docs/measured.md claims.",
}
"""Its commands and what they do, for a command line without it."""

_GROUP = "fl_elastic.laboratory"


def from_laboratory(name: str) -> Any:
    """Return the function of the laboratory that is known by a name.

    Raises
    ------
    LaboratoryMissing
        If the laboratory is not installed.
    """
    found = entry_points(group=_GROUP, name=name)
    if not found:
        raise LaboratoryMissing(f"this command's {name.replace('_', ' ')}")
    return found[name].load()
