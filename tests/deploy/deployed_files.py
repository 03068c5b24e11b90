"""Where the files of deploy/ are, and how they are read."""

from __future__ import annotations

from configparser import RawConfigParser
from pathlib import Path

import fl_elastic

DEPLOY = Path(fl_elastic.__file__).parent.parent / "deploy"
UNITS = sorted([*DEPLOY.glob("systemd/*.service"), *DEPLOY.glob("systemd/*.timer")])


def unit_values(path: Path) -> dict[tuple[str, str], list[str]]:
    """Every setting of a unit by section and name, with all its values in order."""
    parser = RawConfigParser(strict=False, interpolation=None, delimiters=("=",))
    found: dict[tuple[str, str], list[str]] = {}
    section = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif "=" in line and not line.startswith(("#", ";")):
            name, value = line.split("=", 1)
            found.setdefault((section, name.strip()), []).append(value.strip())
    # A file that systemd reads is one that this parser reads as well.
    parser.read_string(path.read_text(encoding="utf-8"))
    assert {name for name, _ in found} <= set(parser.sections())
    return found
