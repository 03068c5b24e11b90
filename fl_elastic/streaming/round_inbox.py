"""Inbox for the result of a round, which another process may write: one file, written atomically."""

from __future__ import annotations

import logging
import os
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import ArchiveError, StreamDataError
from fl_elastic.state.archive import Kind
from fl_elastic.state.codec import read_state, write_state
from fl_elastic.streaming.labelled_weights import LabelledWeights

_LOG = logging.getLogger("fl_elastic")
_KIND = Kind("fl_elastic.round", 2)


@dataclass(frozen=True)
class RoundsTaken:
    """A learner's record of rounds, part of its saved state.

    Parameters
    ----------
    last : str
        Name of the last event that made results of earlier rounds invalid: an applied result, or a request to
        forget; empty if there was none.
    taken, undone : int
        Number of results that were tried, and of those that the guard undid.
    """

    last: str = ""
    taken: int = 0
    undone: int = 0

    def with_one(self, name: str, *, undone: bool) -> RoundsTaken:
        """Return the record with one more result."""
        return RoundsTaken(name, self.taken + 1, self.undone + undone)

    def without_earlier(self) -> RoundsTaken:
        """Return the record after an event that makes the results of rounds that have already begun invalid."""
        return replace(self, last=uuid.uuid4().hex)


@dataclass(frozen=True, eq=False)
class RoundChange:
    """The changes that a round made to the learner's saved model.

    Parameters
    ----------
    name : str
        Unique name of this result.
    after : str
        `RoundsTaken.last` of the saved state from which the round started.
    change : LabelledWeights
        Differences of the weights; for integer tensors and for the rows of new labels, the values themselves.
    new : tuple of int
        Labels that the saved state did not have.
    """

    name: str
    after: str
    change: LabelledWeights
    new: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if any(abs(label) >= 2**63 for label in (*self.new, *self.change.labels)):
            raise StreamDataError("a label takes more than 64 bits")


def change_between(before: LabelledWeights, now: LabelledWeights) -> LabelledWeights:
    """Return the change that turns ``before`` into ``now``, which may have further labels at the end.

    Examples
    --------
    >>> before = LabelledWeights({"b": np.array([1.0, 2.0])}, (7, 3), ("b",))
    >>> now = LabelledWeights({"b": np.array([1.5, 2.0, 4.0])}, (7, 3, 5), ("b",))
    >>> change_between(before, now).weights["b"].tolist()
    [0.5, 0.0, 4.0]
    """
    changes = {}
    for name, value in now.weights.items():
        change = np.array(value)
        if change.dtype.kind == "f":
            known = before.weights[name]
            rows = slice(0, len(known)) if name in now.head else ...
            change[rows] -= known
            if name in now.head:
                # The row of a new label holds its value, because there is no earlier value to subtract.
                fresh = slice(len(before.labels), len(now.labels))
                change[fresh] = value[fresh]
        changes[name] = change
    return LabelledWeights(changes, now.labels, now.head)


def applied(
    present: LabelledWeights, change: RoundChange, known: tuple[int, ...]
) -> LabelledWeights:
    """Return the present model plus a round's change, which keeps everything that was learned meanwhile.

    A label for which the present model has no row is skipped.

    Parameters
    ----------
    present : LabelledWeights
        The learner's model, with rows for the round's new labels.
    change : RoundChange
        The changes that the round made.
    known : tuple of int
        Labels that the learner knew before rows for new labels were added. If a label that is new in the round is
        among them, the learner's own row is kept.

    Examples
    --------
    >>> present = LabelledWeights({"b": np.array([1.0, 2.0, 0.0])}, (7, 3, 5), ("b",))
    >>> change = LabelledWeights({"b": np.array([0.5, 0.0, 4.0])}, (7, 3, 5), ("b",))
    >>> applied(present, RoundChange("1", "", change, new=(5,)), known=(7, 3)).weights["b"].tolist()
    [1.5, 2.0, 4.0]
    """
    weights: dict[str, NDArray[Any]] = {}
    for name, here in present.weights.items():
        there = change.change.weights[name]
        if name not in present.head:
            weights[name] = np.array(there if here.dtype.kind != "f" else here + there)
            continue
        rows = np.array(here)
        for place, label in enumerate(present.labels):
            if label not in change.change.labels:
                continue
            row = there[change.change.labels.index(label)]
            if label not in change.new:
                rows[place] += row
            elif label not in known:
                rows[place] = row
        weights[name] = rows
    return LabelledWeights(weights, present.labels, present.head)


class RoundInbox:
    """The file in a learner's folder to which rounds write their results.

    A later result replaces one that was not claimed yet: both start from the same saved state.

    Parameters
    ----------
    folder : path-like
        The learner's state folder.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        place = Path(folder) / "inbox"
        self._left, self._claimed = place / "round.state", place / "claimed.state"

    def leave(self, change: RoundChange) -> None:
        """Write a result; raise OSError if it cannot be written."""
        write_state(self._left, _KIND, change)

    def claim(self) -> RoundChange | None:
        """Return the waiting result, and reserve it until `done`; return None if there is none.

        A result is returned again if the process that claimed it died. A result that cannot be read is deleted.
        """
        if not self._claimed.exists():
            try:
                os.rename(self._left, self._claimed)
            except OSError:
                return None
        try:
            return read_state(RoundChange, self._claimed, _KIND)
        except (OSError, ArchiveError) as error:
            _LOG.warning("the result of a round in %s is not used: %s", self._claimed, error)
            self.done()
            return None

    def done(self) -> None:
        """Delete the claimed result."""
        try:
            self._claimed.unlink(missing_ok=True)
        except OSError as error:
            _LOG.warning("cannot remove %s: %s", self._claimed, error.strerror)
