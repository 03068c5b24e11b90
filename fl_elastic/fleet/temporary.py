"""The temporary folder of a local fleet; it holds keys, so folders of killed fleets are removed."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

from fl_elastic.state.files import only_one

__all__ = ["TemporaryFolder"]

_PREFIX = "fl-elastic-fleet-"
_HELD = ".held"


class TemporaryFolder:
    """A folder for this process alone, until it is closed.

    The folder of a killed process is recognised by its lock file, which is no longer locked.

    Raises
    ------
    OSError
        If the folder cannot be made.
    """

    def __init__(self) -> None:
        remove_abandoned(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX)).resolve()
        self._held = ExitStack()
        self._held.enter_context(only_one(self.path / _HELD))
        # An empty lock file belongs to a folder that is being made and may be locked next.
        (self.path / _HELD).write_text("this fleet runs as long as this file is locked\n")

    def close(self) -> None:
        """Remove the folder with everything in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._held.close()


def remove_abandoned(place: Path) -> list[Path]:
    """Remove this user's folders in ``place`` whose process is gone, and return them."""
    removed = []
    for folder in sorted(place.glob(f"{_PREFIX}*")):
        mark = folder / _HELD
        try:
            if folder.lstat().st_uid != os.geteuid() or not mark.read_text():
                continue
            with only_one(mark):
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            # The folder is in use, or was not made by this class.
            continue
        removed.append(folder)
    return removed
