"""How far a stream had been read at the last round of the federation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fl_elastic.errors import ArchiveError
from fl_elastic.state.archive import Kind
from fl_elastic.state.codec import read_state, write_state

_FILE = "position.state"
_KIND = Kind("fl_elastic.stream_position")


@dataclass(frozen=True)
class StreamPosition:
    """How far a stream had been read at the last round; later samples are new to the federation.

    Parameters
    ----------
    observed, labelled, drifts : int
        Counters of `Progress`.
    newest : int
        Number of the newest sample, which is its id in the store.
    rounds : int
        Number of rounds so far.
    """

    observed: int = 0
    labelled: int = 0
    drifts: int = 0
    newest: int = 0
    rounds: int = 0

    @classmethod
    def load(cls, folder: Path) -> StreamPosition:
        """Return the position saved in a learner's folder; the beginning of the stream if none can be read."""
        try:
            return read_state(cls, folder / _FILE, _KIND)
        except (OSError, ArchiveError):
            return cls()

    def save(self, folder: Path) -> None:
        """Save it in a learner's folder; OSError if the disk does not take it."""
        write_state(folder / _FILE, _KIND, self)
