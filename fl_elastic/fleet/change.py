"""What a command changed in the folder of a fleet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["Change"]


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
