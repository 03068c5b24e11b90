"""What fl-elastic-simulations adds to commands, found by entry points: it may not be installed."""

from __future__ import annotations

import json
import shlex
from importlib.metadata import PackageNotFoundError, distribution, entry_points
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from fl_elastic.errors import LaboratoryMissing

__all__ = ["COMMANDS", "from_laboratory", "laboratory_install", "missing"]

COMMANDS = {
    "simulate": "Simulate a federation of unequal devices and compare methods.",
    "init": "Write a new project: a Flower app with a model, data, and a scenario to simulate.",
    "prepare": "Distil a small backbone on public images, for a fleet to begin with.",
    "bench": "Measure what docs/measured/ claims.",
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
        raise missing(f"this command's {name.replace('_', ' ')}")
    return found[name].load()


def missing(wanted: str) -> LaboratoryMissing:
    """Return the error for something that only the laboratory has."""
    return LaboratoryMissing(
        f"{wanted} is part of the laboratory: install it with {laboratory_install()}"
    )


def laboratory_install() -> str:
    """Return the command that installs the laboratory: no registry has it, it comes from where this came from."""
    source = _checkout()
    if source is None:
        return "python -m pip install CHECKOUT/simulations, CHECKOUT being the source's folder"
    return f"python -m pip install {shlex.quote(str(source / 'simulations'))}"


def _checkout() -> Path | None:
    """Return the folder of the source that this was installed from; None where it is not here."""
    beside = Path(__file__).parents[1]
    found = [beside] if (beside / "simulations").is_dir() else []
    try:
        # Where pip has it from (PEP 610).
        told = json.loads(distribution("fl-elastic").read_text("direct_url.json") or "{}")
        if url := told.get("url"):
            found.append(Path(unquote(urlparse(url).path)))
    except (PackageNotFoundError, ValueError):
        pass
    return next((each for each in found if (each / "simulations").is_dir()), None)
