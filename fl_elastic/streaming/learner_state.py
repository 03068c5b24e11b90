"""What a learner must know to go on after a restart, in one file that is old or new and never half."""

from __future__ import annotations

import io
import json
import logging
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import ProfileError, StreamError
from fl_elastic.profiling import CostProfile, load_profile, save_profile
from fl_elastic.storage import remove_leftovers, write_atomically
from fl_elastic.streaming.aside import forget_oldest, name_aside

__all__ = ["SavedState", "StateFolder", "load_state", "save_state"]

_LOG = logging.getLogger("fl_elastic")
_FORMAT = "fl_elastic.stream"
_VERSION = 1
_STATE, _PROFILE = "learner.npz", "profile.json"
_FACTS = "facts"


@dataclass(frozen=True, eq=False)
class SavedState:
    """Facts that JSON can hold, and named arrays.

    Parameters
    ----------
    facts : mapping
        Counters, settings, short lists.
    arrays : mapping of str to array
        Weights, samples.
    """

    facts: Mapping[str, Any]
    arrays: Mapping[str, NDArray[Any]]

    def under(self, prefix: str) -> dict[str, NDArray[Any]]:
        """Return the arrays whose names begin so, without that beginning."""
        return {
            name.removeprefix(prefix): array
            for name, array in self.arrays.items()
            if name.startswith(prefix)
        }


def save_state(path: Path, state: SavedState) -> None:
    """Write the state; OSError if the disk does not take it, the old state is then still there."""
    text = json.dumps({"format": _FORMAT, "version": _VERSION, **state.facts})
    buffer = io.BytesIO()
    arrays: dict[str, Any] = {**state.arrays, _FACTS: np.frombuffer(text.encode(), np.uint8)}
    np.savez(buffer, **arrays)
    write_atomically(path, buffer.getvalue())


def load_state(path: Path) -> SavedState | None:
    """Read what `save_state` wrote; None if there is no file, or a damaged one, which is put aside.

    Raises
    ------
    StreamError
        If the file cannot be read, or is of another version.
    """
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        facts = json.loads(arrays.pop(_FACTS).tobytes())
        if facts["format"] != _FORMAT:
            raise ValueError(f"its format is {facts['format']!r}")
        version = facts["version"]
    except FileNotFoundError:
        return None
    except (
        ValueError, KeyError, TypeError, EOFError, AttributeError, RecursionError,
        zipfile.BadZipFile,
    ) as error:  # fmt: skip
        _put_aside(path, str(error))
        return None
    except OSError as error:
        raise StreamError(f"cannot read the state {path}: {error.strerror or error}") from None
    if version != _VERSION:
        raise StreamError(
            f"the state {path} has version {version!r}, expected {_VERSION}: use the release that wrote it, or "
            "another folder"
        )
    return SavedState(facts, arrays)


def _put_aside(path: Path, why: str) -> None:
    aside = name_aside(path)
    try:
        path.rename(aside)
        forget_oldest(path)
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

    def load(self) -> SavedState | None:
        """Return the state; see `load_state`. What killed processes left half written is deleted."""
        for place in (self.path, self.path / "inbox", self.path / "rounds"):
            remove_leftovers(place)
        return load_state(self.path / _STATE)

    def save(self, state: SavedState) -> bool:
        """Write the state; return whether the disk took it, the old one is there if not."""
        try:
            save_state(self.path / _STATE, state)
        except OSError as error:
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
