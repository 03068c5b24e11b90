"""Who started whom on this machine, as ``/proc`` tells."""

from __future__ import annotations

from pathlib import Path

__all__ = ["children_of", "is_alive"]

_PROC = Path("/proc")


def children_of(pid: int) -> list[int]:
    """Return the ids of all processes that this one started and that have not been collected."""
    found = []
    for folder in _PROC.glob("[0-9]*"):
        fields = _fields(folder)
        if len(fields) > 1 and fields[1] == str(pid):
            found.append(int(folder.name))
    return found


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not collected does not."""
    fields = _fields(_PROC / str(pid))
    return bool(fields) and fields[0] not in ("Z", "X")


def _fields(folder: Path) -> list[str]:
    """Return state, parent and so on; nothing where the process has gone."""
    try:
        # The name in brackets may hold blanks and brackets.
        return (folder / "stat").read_text().rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return []
