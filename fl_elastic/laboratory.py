"""Commands and functions of fl-elastic-simulations, found by entry points if it is installed."""

from __future__ import annotations

import json
import shlex
from importlib.metadata import PackageNotFoundError, distribution, entry_points
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from fl_elastic.errors import LaboratoryMissing

COMMANDS = {
    "simulate": "Simulate a federation of unequal devices and compare methods.",
    "init": "Write a new project: a Flower app with a model, data, and a scenario to simulate.",
    "prepare": "Distil a small backbone on public images, for a fleet to begin with.",
    "bench": "Measure what docs/measured/ claims.",
}
"""The laboratory's commands and their descriptions, for the help text if the laboratory is not installed."""

_GROUP = "fl_elastic.laboratory"


def from_laboratory(name: str) -> Any:
    """Return the laboratory's function that is registered under a name.

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
    """Return the command that installs the laboratory from the source; no package registry has it."""
    source = _checkout()
    if source is None:
        return "python -m pip install CHECKOUT/simulations, CHECKOUT being the source's folder"
    return f"python -m pip install {shlex.quote(str(source / 'simulations'))}"


def _checkout() -> Path | None:
    """Return the source folder from which this was installed; None if it is not on this machine."""
    beside = Path(__file__).parents[1]
    found = [beside] if (beside / "simulations").is_dir() else []
    try:
        # The source from which pip has installed it (PEP 610).
        origin = json.loads(distribution("fl-elastic").read_text("direct_url.json") or "{}")
        if url := origin.get("url"):
            found.append(Path(unquote(urlparse(url).path)))
    except (PackageNotFoundError, ValueError):
        pass
    return next((each for each in found if (each / "simulations").is_dir()), None)
