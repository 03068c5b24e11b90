"""Changes that a command made in the folder of a fleet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fl_elastic.fleet.private_files import PUBLIC_FILE, write_if_changed


@dataclass(frozen=True)
class Change:
    """One file or folder of a fleet that a command created, changed, or found unchanged.

    Parameters
    ----------
    what : {"created", "updated", "repaired", "kept"}
        ``kept``: it existed already and was not changed.
    path : Path
        The file or folder.
    why : str
        Explanation; empty if none is needed.
    """

    what: str
    path: Path
    why: str = ""


def ensure_file(
    path: Path, data: bytes, mode: int = PUBLIC_FILE, otherwise: str = "updated"
) -> Change:
    """Write ``data`` to a file unless it has this content; return whether it was created, changed or kept.

    ``otherwise`` is `Change.what` for a file that had other content.
    """
    missing = not path.is_file()
    if write_if_changed(path, data, mode):
        return Change("created" if missing else otherwise, path)
    return Change("kept", path)
