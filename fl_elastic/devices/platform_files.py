"""Read files and commands that describe a platform; those that are absent or damaged give None.

``root`` is put before every path: ``/`` on a device, the folder of an artificial tree in a test.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

HERE = Path("/")
"""The root of the device on which this process runs."""

_MOST_BYTES = 1 << 16
_COMMAND_SECONDS = 2.0
_COMMAND_FOLDERS = ("usr/bin", "usr/local/bin", "opt/vc/bin", "bin")
_INTEGER = re.compile(r"\s*([+-]?[0-9]{1,25})\s*")


def text_in(path: Path) -> str | None:
    """Return the text of a file without surrounding white space and zero bytes; None if it cannot be read.

    Examples
    --------
    >>> text_in(Path("/proc/no/such/file")) is None
    True
    """
    try:
        with path.open("rb") as stream:
            data = stream.read(_MOST_BYTES)
    except (OSError, ValueError):
        # Sensors that sleep or are not connected give various errors.
        return None
    return data.decode("utf-8", errors="replace").strip("\0 \t\r\n")


def integer(text: str | None) -> int | None:
    r"""Return the integer in a text; None if the text is anything else.

    Examples
    --------
    >>> integer(" 48312\n"), integer("n/a"), integer("1.5"), integer(None)
    (48312, None, None, None)
    """
    found = _INTEGER.fullmatch(text or "")
    return int(found[1]) if found else None


def matching(root: Path, pattern: str) -> list[Path]:
    """Return the sorted paths below ``root`` that match a pattern; none if a folder cannot be read."""
    try:
        return sorted(root.glob(pattern))
    except OSError:
        return []


def command_output(root: Path, command: Sequence[str]) -> str | None:
    """Return the output of a command of this tree; None if it is absent, fails or takes more than 2 s.

    Parameters
    ----------
    root : Path
        Root of the usual folders (``usr/bin``, ...) in which the command is looked up.
    command : sequence of str
        Name and arguments of the command.
    """
    name, *arguments = command
    for folder in _COMMAND_FOLDERS:
        program = root / folder / name
        if not program.is_file():
            continue
        try:
            ended = subprocess.run(
                [str(program), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=_COMMAND_SECONDS,
                check=False,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        if ended.returncode != 0:
            return None
        return ended.stdout[:_MOST_BYTES].decode("utf-8", errors="replace")
    return None
