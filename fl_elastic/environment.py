"""Environment of a measurement: versions of packages, kind of processor and date."""

from __future__ import annotations

import datetime
import platform
from importlib.metadata import PackageNotFoundError, version


def environment() -> dict[str, str]:
    """Return the versions of Python, fl-elastic, torch, flwr and numpy, the kind of processor, and today's date."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for package in ("fl-elastic", "torch", "flwr", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    found["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
    return found
