"""What a learner must know to go on after a restart, in one file that is old or new and never half."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fl_elastic.errors import (
    ArchiveError,
    ArchiveVersionError,
    ElasticError,
    ProfileError,
    StreamDataError,
    StreamError,
)
from fl_elastic.profiling import CostProfile, load_profile, save_profile
from fl_elastic.state.archive import Archive, Kind, read_archive, write_archive
from fl_elastic.state.files import remove_leftovers
from fl_elastic.streaming.aside import put_aside

__all__ = ["StateFolder", "load_state", "save_state", "taking_over"]

_LOG = logging.getLogger("fl_elastic")
_KIND = Kind("fl_elastic.stream")
_STATE, _PROFILE = "learner.state", "profile.state"


def save_state(path: Path, state: Archive) -> None:
    """Write the state; OSError if the disk does not take it, the old state is then still there."""
    write_archive(path, _KIND, state.facts, state.arrays)


def load_state(path: Path) -> Archive | None:
    """Read what `save_state` wrote; None if there is no file, or a damaged one, which is put aside.

    Raises
    ------
    StreamError
        If the file cannot be read, or is of another version.
    """
    try:
        return read_archive(path, _KIND)
    except FileNotFoundError:
        return None
    except ArchiveVersionError as error:
        raise StreamDataError(
            f"the state {path} is of another release ({error}): use the release that wrote it, or another folder"
        ) from None
    except ArchiveError as error:
        _start_afresh(path, str(error))
        return None
    except OSError as error:
        raise StreamError(f"cannot read the state {path}: {error.strerror or error}") from None


@contextmanager
def taking_over(folder: Path) -> Iterator[None]:
    """Raise StreamError where a whole file turns out to hold something else than a learner's state."""
    try:
        yield
    except ElasticError:
        raise
    except (
        KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RuntimeError, MemoryError,
    ) as error:  # fmt: skip
        why = (str(error).splitlines() or [""])[0][:200]
        raise StreamDataError(
            f"{folder / _STATE} is no learner's state ({type(error).__name__}: {why}): move it away to start "
            "afresh, or use another folder"
        ) from None


def _start_afresh(path: Path, why: str) -> None:
    try:
        aside = put_aside(path)
    except OSError as error:
        raise StreamError(
            f"the state {path} is damaged ({why}) and cannot be put aside: {error.strerror or error}"
        ) from None
    _LOG.error(
        "the learner's state %s is damaged (%s): it was put aside as %s, and learning starts afresh",
        path, why, aside.name,
    )  # fmt: skip


class StateFolder:
    """The folder in which a learner keeps its state and what it has measured of its device.

    Parameters
    ----------
    path : path-like
        Made when it is first written to.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def load(self) -> Archive | None:
        """Return the state; see `load_state`. What killed processes left half written is deleted."""
        for place in (self.path, self.path / "inbox", self.path / "rounds"):
            remove_leftovers(place)
        return load_state(self.path / _STATE)

    def save(self, state: Archive) -> bool:
        """Write the state; return whether the disk took it, the old one is there if not."""
        try:
            save_state(self.path / _STATE, state)
        except (OSError, ArchiveError) as error:
            _LOG.warning("the learner's state could not be saved to %s: %s", self.path, error)
            return False
        return True

    def profile(self) -> CostProfile | None:
        """Return the measured costs; None if there are none that can be read."""
        path = self.path / _PROFILE
        try:
            return load_profile(path) if path.exists() else None
        except ProfileError as error:
            _LOG.warning("%s; costs are measured anew", error)
            return None

    def keep_profile(self, profile: CostProfile) -> None:
        """Write measured costs; a disk that does not take them costs another measurement after a restart."""
        try:
            save_profile(profile, self.path / _PROFILE)
        except ProfileError as error:
            _LOG.warning("%s", error)
