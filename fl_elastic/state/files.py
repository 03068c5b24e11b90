"""Files written atomically that only their owner can read, and file locks."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

OWNER_ONLY = 0o600
"""Permissions of state files: samples, weights and journals reveal personal data."""
_FOLDER = 0o700
_TEMPORARY = re.compile(r"\..+\.(\d+)\.tmp")


def write_atomically(
    path: str | os.PathLike[str],
    data: bytes | Sequence[bytes | memoryview],
    mode: int | None = None,
    *,
    durable: bool = True,
) -> Path:
    """Replace the file at ``path`` by ``data``, through a temporary file beside it; make its folder if missing.

    ``data`` may be several parts, which are written one after the other.

    With a ``mode``, the file has exactly these permissions from its first byte on, whatever the umask; if only the
    owner may access it, this also holds for a folder made for it. Without a ``mode``, file and folder have default
    permissions, for files that others read.

    With ``durable`` the function waits until the data are on the disk, so that the file survives a loss of power.
    Otherwise such a loss may leave a damaged file.
    """
    target = Path(path)
    if mode is None or mode & ~OWNER_ONLY:
        target.parent.mkdir(parents=True, exist_ok=True)
    else:
        private_folder(target.parent)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(
            temporary, "wb", opener=partial(os.open, mode=0o666 if mode is None else mode)
        ) as stream:
            if mode is not None:
                # The umask, or a file left by an interrupted process, may have led to other permissions.
                os.fchmod(stream.fileno(), mode)
            stream.writelines([data] if isinstance(data, bytes) else data)
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def private_folder(path: str | os.PathLike[str]) -> None:
    """Make a folder and its missing parents so that only their owner can enter, whatever the umask."""
    missing, here = [], Path(path).absolute()
    while not here.exists():
        missing.append(here)
        here = here.parent
    for each in reversed(missing):
        try:
            each.mkdir(_FOLDER)
        except FileExistsError:
            # Another process has made it meanwhile.
            continue
        each.chmod(_FOLDER)


def private_file(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file that only its owner can read and write; it and its folder are made if missing.

    Wider permissions of an existing file are reduced if this process may do so.
    """
    private_folder(Path(path).parent)
    descriptor = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, OWNER_ONLY)
    if stat.S_IMODE(os.fstat(descriptor).st_mode) != OWNER_ONLY:
        with suppress(PermissionError):
            os.fchmod(descriptor, OWNER_ONLY)
    return descriptor


def remove_leftovers(folder: str | os.PathLike[str]) -> list[str]:
    """Delete the temporary files of `write_atomically` whose process has ended; return their names.

    A process that is killed while writing leaves such a file. A file that cannot be deleted, or whose process is
    alive, stays.
    """
    removed = []
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    for name in names:
        found = _TEMPORARY.fullmatch(name)
        if found is None or _lives(int(found[1])):
            continue
        try:
            os.unlink(Path(folder) / name)
        except OSError:
            continue
        removed.append(name)
    return sorted(removed)


@contextmanager
def only_one(path: str | os.PathLike[str]) -> Iterator[None]:
    """Make a file and hold its lock until the context or this process ends.

    Raises
    ------
    BlockingIOError
        If another process holds the lock.
    OSError
        If the file cannot be made or opened.
    """
    # Imported here: not available on every system, and only needed for the lock.
    import fcntl

    # A descriptor for reading is enough for a lock.
    descriptor = private_file(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _lives(pid: int) -> bool:
    try:
        # Signal 0 also finds processes of other users, even if /proc hides them.
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True
