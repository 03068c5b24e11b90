"""Write files so that a reader sees the old content or the new, never half."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

__all__ = ["write_atomically"]


def write_atomically(path: str | os.PathLike[str], data: bytes, mode: int | None = None) -> Path:
    """Replace the file at ``path`` by ``data`` through a temporary file beside it; make its folder.

    With a ``mode`` the file has exactly these permissions from its first byte on, whatever the umask;
    without one it has those of any new file.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(
            temporary, "wb", opener=partial(os.open, mode=0o666 if mode is None else mode)
        ) as stream:
            if mode is not None:
                # One that an interrupted process left behind, or the umask, may have made it another.
                os.fchmod(stream.fileno(), mode)
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return target
