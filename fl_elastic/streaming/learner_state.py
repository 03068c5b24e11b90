"""State of a learner that survives a restart: one file beside its store, written atomically.

`fl_elastic.streaming.learner.StreamLearner.save` documents the order in which store, state and log are written.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import (
    ArchiveError,
    ArchiveVersionError,
    ProfileError,
    StreamDataError,
    StreamError,
)
from fl_elastic.profiling import CostProfile, load_profile, save_profile
from fl_elastic.state.archive import Kind, read_archive
from fl_elastic.state.codec import from_archive, write_state
from fl_elastic.state.files import remove_leftovers
from fl_elastic.streaming.classifier import ClassifierState
from fl_elastic.streaming.guard import RecentSamples
from fl_elastic.streaming.learning_rule import Adaptation, RuleState
from fl_elastic.streaming.progress import Progress, StreamRecord
from fl_elastic.streaming.quarantine import quarantine
from fl_elastic.streaming.round_inbox import RoundsTaken

_LOG = logging.getLogger("fl_elastic")
_KIND = Kind("fl_elastic.stream", 3)
_STATE, _PROFILE = "learner.state", "profile.state"


@dataclass(frozen=True, eq=False)
class LearnerState:
    """Everything that a learner keeps except its samples.

    Parameters
    ----------
    classifier, rule, recent, progress, record, adaptations, rounds
        As in the learner; the defaults are those of a learner that has seen nothing.
    events : int
        Number of events (samples and labels) included; later events are in the log.
    number : int
        Number of the newest sample.
    positions : dict of str to mapping
        How far each source has been read.
    names : dict of str to int
        Sample number of each sender's name.
    errors : array
        Errors that the drift detector was given.
    """

    classifier: ClassifierState
    rule: RuleState = field(default_factory=RuleState)
    recent: RecentSamples = field(default_factory=RecentSamples)
    progress: Progress = field(default_factory=Progress)
    record: StreamRecord = field(default_factory=StreamRecord)
    adaptations: tuple[Adaptation, ...] = ()
    rounds: RoundsTaken = field(default_factory=RoundsTaken)
    events: int = 0
    number: int = 0
    positions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    errors: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))


def save_state(path: Path, state: LearnerState) -> None:
    """Write the state; raise OSError if that fails, in which case the old state stays."""
    write_state(path, _KIND, state)


def load_state(path: Path) -> LearnerState | None:
    """Read the state that `save_state` wrote; None if there is no file, or a damaged one, which is renamed.

    Raises
    ------
    StreamError
        If the file cannot be read, is of another version, or is intact and not a learner's state.
    """
    try:
        archive = read_archive(path, _KIND)
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
    try:
        return from_archive(LearnerState, archive)
    except ArchiveError as error:
        raise StreamDataError(
            f"{path} is no learner's state ({error}): move it away to start afresh, or use another folder"
        ) from None


def _start_afresh(path: Path, why: str) -> None:
    try:
        aside = quarantine(path)
    except OSError as error:
        raise StreamError(
            f"the state {path} is damaged ({why}) and cannot be put aside: {error.strerror or error}"
        ) from None
    _LOG.error(
        "the learner's state %s is damaged (%s): it was put aside as %s, and learning starts afresh",
        path, why, aside.name,
    )  # fmt: skip


class StateFolder:
    """The folder in which a learner keeps its state and the measured costs of its device.

    Parameters
    ----------
    path : path-like
        The folder; it is made with the first write.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def load(self) -> LearnerState | None:
        """Return the state, see `load_state`, after deleting incomplete files of killed processes."""
        for place in (self.path, self.path / "inbox", self.path / "rounds"):
            remove_leftovers(place)
        return load_state(self.path / _STATE)

    def save(self, state: LearnerState) -> bool:
        """Write the state; return whether it was written. If not, the previous state stays."""
        try:
            save_state(self.path / _STATE, state)
        except (OSError, ArchiveError) as error:
            _LOG.warning("the learner's state could not be saved to %s: %s", self.path, error)
            return False
        return True

    def profile(self) -> CostProfile | None:
        """Return the measured costs; None if there are no readable ones."""
        path = self.path / _PROFILE
        try:
            return load_profile(path) if path.exists() else None
        except ProfileError as error:
            _LOG.warning("%s; costs are measured anew", error)
            return None

    def keep_profile(self, profile: CostProfile) -> None:
        """Write measured costs; if that fails, they are measured again after a restart."""
        try:
            save_profile(profile, self.path / _PROFILE)
        except ProfileError as error:
            _LOG.warning("%s", error)
