"""What a command changed in the folder of a fleet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fl_elastic.fleet.files import PUBLIC_FILE, write_if_changed

__all__ = ["Change", "ensure_file"]


@dataclass(frozen=True)
class Change:
    """One thing that was done.

    Parameters
    ----------
    what : {"created", "updated", "repaired", "kept"}
        ``kept``: it was there already, and was left as it is.
    path : Path
        To what.
    why : str
        In words; empty where it needs none.
    """

    what: str
    path: Path
    why: str = ""


def ensure_file(
    path: Path, data: bytes, mode: int = PUBLIC_FILE, otherwise: str = "updated"
) -> Change:
    """Let a file hold ``data``; say whether it was missing, held something else (``otherwise``), or was kept."""
    missing = not path.is_file()
    if write_if_changed(path, data, mode):
        return Change("created" if missing else otherwise, path)
    return Change("kept", path)
