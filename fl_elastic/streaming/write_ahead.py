"""Write-ahead logging: before an event is reported, it is in the log or the saved state and survives a kill.

A power cut may lose events in the log that the operating system has not yet written to the disk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from fl_elastic.streaming.event_log import Event, EventLog, read_events

_LOG = logging.getLogger("fl_elastic")
_FILE = "events.log"
_LEAST, _MOST = 2**16, 2**23
# Number of events between two attempts to save while the log cannot be written.
_PATIENCE = 64


def log_bytes(capacity_bytes: int) -> int:
    """Return the bytes of the log, for a store of this capacity, after which the state is saved.

    >>> log_bytes(2**17), log_bytes(64 * 2**20)
    (65536, 8388608)
    """
    return min(max(capacity_bytes // 8, _LEAST), _MOST)


def labelled_since(folder: Path, events: int) -> frozenset[int]:
    """Return the samples in a learner's folder whose labels came or changed after its first ``events`` events."""
    later = [event.facts for event in read_events(folder / _FILE) if event.number > events]
    return frozenset(int(facts["id"]) for facts in later if "label" in facts)


class WriteAhead:
    """The log of all events since the last save.

    Parameters
    ----------
    folder : Path
        Folder of the state.
    most : int
        Bytes of the log after which the state should be saved.
    save : callable
        Saves the state, including all events so far; returns whether that was possible.

    Attributes
    ----------
    events : int
        Number of events since the beginning of the stream, across restarts.
    """

    def __init__(self, folder: Path, most: int, save: Callable[[], bool]) -> None:
        # The file may grow beyond ``most``: one event may be long, and saving may fail for a while.
        self._log = EventLog(folder / _FILE, 4 * most)
        self._most, self._save = most, save
        self.events = 0
        self._early: list[Event] = []
        self._gap = 0

    @property
    def is_long(self) -> bool:
        """Whether the log is so long that the state should be saved."""
        return self._log.size > self._most

    def since(self, events: int) -> list[Event]:
        """Return the events that follow the first ``events`` ones, up to the first that is missing."""
        self.events = events
        found: list[Event] = []
        for event in self._log.read():
            if event.number == events + len(found) + 1:
                found.append(event)
            elif event.number > events:
                _LOG.warning("events that do not follow on the saved state were left out")
                # Later events would have a gap before them, too: the state must be saved before the next one
                # counts.
                self._gap = events + len(found) + 1
                break
        self.events += len(found)
        return found

    def note(self, facts: Mapping[str, Any], x: NDArray[Any] | None, *, learned: bool) -> bool:
        """Write an event; return whether it survives a kill.

        Parameters
        ----------
        facts, x
            See `Event`.
        learned : bool
            Whether there has been a valid sample. Earlier refusals are written together with the first valid
            sample, so that a learner whose settings do not fit the stream leaves no files behind.
        """
        self.events += 1
        event = Event(self.events, facts, x)
        if not learned:
            self._early.append(event)
            return True
        early, self._early = self._early, []
        if not self._gap and all(self._log.add(each) for each in [*early, event]):
            return True
        if not self._gap:
            self._gap = self.events
            _LOG.warning(
                "new samples cannot be written to the log in the state folder: its disk may be full"
            )
        # After a gap, only a saved state makes the record complete.
        if self._has_room(event) or (self.events - self._gap) % _PATIENCE == 0:
            return self._save()
        return False

    def saved(self) -> None:
        """Clear the log: the saved state includes all its events."""
        self._log.clear()
        self._early, self._gap = [], 0

    def close(self) -> None:
        """Close the file."""
        self._log.close()

    def _has_room(self, event: Event) -> bool:
        taken = self._log.add(event)
        if taken:
            self._log.drop_last(event)
        return taken
