"""Shakespeare's plays as windows of characters: the targets are the next characters, the owners the roles."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fl_elastic.errors import DatasetError
from fl_elastic_simulations.data.datasets import Dataset

__all__ = ["CHARACTERS", "LENGTH", "RoleWindows", "plays", "role_windows", "windows_of"]

IntArray = npt.NDArray[np.int64]

CHARACTERS = 128
"""Number of characters of a text model: ASCII; any other character is read as a question mark."""
LENGTH = 64
"""Number of characters of a window."""

_SPEECH = re.compile(r"^([^\n:]{1,40}):\n(.+?)(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)
_FEWEST = 16
_TEST_SHARE = 0.1


@dataclass(frozen=True, eq=False)
class RoleWindows:
    """Windows of all roles with enough text.

    Attributes
    ----------
    x, y : array of int64, shape (windows, LENGTH)
        Characters, and the next character after each.
    role : array of int64, shape (windows,)
        Role that speaks.
    late : array of bool, shape (windows,)
        Whether the window is from the last tenth of its role's text.
    """

    x: IntArray
    y: IntArray
    role: IntArray
    late: npt.NDArray[np.bool_]


def role_windows(path: Path) -> RoleWindows:
    """Read a text of blocks ``ROLE:`` and speech, separated by empty lines.

    Raises
    ------
    DatasetError
        If the file is missing, or no role has enough text.
    """
    try:
        text = path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        raise DatasetError(
            f"plays: no file {path} ({error.strerror}): give the folder that holds "
            f"{path.parent.name}/{path.name} with --data-root or FL_ELASTIC_DATA_ROOT"
        ) from None
    said: dict[str, list[str]] = {}
    for role, speech in _SPEECH.findall(text):
        said.setdefault(role, []).append(speech)
    parts = {role: windows_of("\n".join(speeches)) for role, speeches in sorted(said.items())}
    parts = {role: windows for role, windows in parts.items() if len(windows) >= _FEWEST}
    if not parts:
        raise DatasetError(
            f"plays: {path} holds no role that says {_FEWEST * LENGTH} characters: is it that text?"
        )
    whole = np.concatenate(list(parts.values()))
    late = [
        np.arange(len(windows)) >= (1 - _TEST_SHARE) * len(windows) for windows in parts.values()
    ]
    return RoleWindows(
        x=whole[:, :-1].copy(),
        y=whole[:, 1:].copy(),
        role=np.repeat(np.arange(len(parts)), [len(windows) for windows in parts.values()]),
        late=np.concatenate(late),
    )


def windows_of(text: str) -> IntArray:
    """Return windows of ``LENGTH`` characters plus the next one, which begins the next window.

    Examples
    --------
    >>> windows_of("abc" * 50).shape
    (2, 65)
    """
    codes = np.frombuffer(text.encode("ascii", errors="replace"), np.uint8).astype(np.int64)
    count = max((len(codes) - 1) // LENGTH, 0)
    places = LENGTH * np.arange(count)[:, None] + np.arange(LENGTH + 1)
    return np.asarray(codes[places])


def plays(root: Path) -> Dataset:
    """Return characters of Shakespeare's plays in windows of 64, with the next character of each.

    The owner of a window is its role, see `role_windows`. The last tenth of each role's text is the test set.
    """
    windows = role_windows(root / "tinyshakespeare" / "input.txt")
    train, test = ~windows.late, windows.late
    return Dataset(
        "plays",
        windows.x[train],  # type: ignore[arg-type]
        windows.y[train],
        windows.x[test],  # type: ignore[arg-type]
        windows.y[test],
        classes=CHARACTERS,
        input_shape=(LENGTH,),
        owners=windows.role[train],
    )
