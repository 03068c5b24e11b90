"""Files of a fleet's folder; secret ones are never readable by others, not even while they are written."""

from __future__ import annotations

import fcntl
import os
import stat
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomli_w

from fl_elastic.errors import FleetError
from fl_elastic.state.files import write_atomically

PRIVATE_FILE = 0o600
PUBLIC_FILE = 0o644
PRIVATE_FOLDER = 0o700


def mode_of(path: Path) -> int:
    """Return the permission bits of a file or folder."""
    return stat.S_IMODE(path.stat().st_mode)


def make_folder(path: Path) -> bool:
    """Make a folder that only its owner can enter, and return whether it was missing.

    Raises
    ------
    FleetError
        If the folder cannot be made.
    """
    if path.is_dir():
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=PRIVATE_FOLDER)
    except OSError as error:
        raise _cannot("make folder", path, error) from error
    return True


def mend_mode(path: Path, mode: int) -> bool:
    """Remove permissions beyond ``mode`` from a file or folder; return whether there were any.

    Permissions are never added, because an administrator may have restricted them deliberately.
    """
    found = mode_of(path)
    if found & ~mode == 0:
        return False
    path.chmod(found & mode)
    return True


def write_file(path: Path, data: bytes, mode: int) -> None:
    """Write a file atomically, with its permissions from the first byte on.

    Raises
    ------
    FleetError
        If it cannot be written.
    """
    try:
        write_atomically(path, data, mode)
        owner = path.parent.stat()
        if os.geteuid() == 0 and owner.st_uid != 0:
            # If root changes the folder of a service, the service must still be able to read its files.
            os.chown(path, owner.st_uid, owner.st_gid)
    except OSError as error:
        raise _cannot("write", path, error) from error


def write_if_changed(path: Path, data: bytes, mode: int) -> bool:
    """Write a file if it is missing or has other content; return whether it was written.

    Raises
    ------
    FleetError
        If it cannot be read or written.
    """
    if path.is_file() and read_bytes(path) == data:
        return False
    write_file(path, data, mode)
    return True


def read_bytes(path: Path) -> bytes:
    """Read a file.

    Raises
    ------
    FleetError
        If it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise _cannot("read", path, error) from error


def read_toml(path: Path, remedy: str) -> dict[str, Any]:
    """Read a TOML file.

    Raises
    ------
    FleetError
        If it cannot be read or is damaged; the message ends with ``remedy``.
    """
    try:
        return tomllib.loads(read_bytes(path).decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FleetError(f"{path} is damaged ({error}); {remedy}") from error
    except RecursionError:
        raise FleetError(f"{path} is damaged (nested too deeply); {remedy}") from None


def toml_bytes(comment: str, table: Mapping[str, Any]) -> bytes:
    """Return a table as the content of a TOML file that starts with a comment."""
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    return f"{head}\n{tomli_w.dumps(table)}".encode()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a fleet's folder, so that only one process at a time changes it; others wait.

    Raises
    ------
    FleetError
        If the folder cannot be written.
    """
    path = folder / ".lock"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
    except OSError as error:
        raise _cannot("write", path, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _cannot(what: str, path: Path, error: OSError) -> FleetError:
    return FleetError(
        f"cannot {what} {path}: {error.strerror or error}; "
        "check the path, the free space and who owns the folder"
    )
