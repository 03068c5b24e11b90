"""Inbox for a round's result, which may come from another process: a file that is written atomically."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import ArchiveError, StreamDataError
from fl_elastic.state.archive import Kind
from fl_elastic.state.codec import read_state, write_state
from fl_elastic.streaming.labelled_weights import LabelledWeights

__all__ = ["RoundChange", "RoundInbox", "RoundsTaken", "applied", "change_between"]

_LOG = logging.getLogger("fl_elastic")
_KIND = Kind("fl_elastic.round", 2)


@dataclass(frozen=True)
class RoundsTaken:
    """What a learner remembers of rounds, in its saved state.

    Parameters
    ----------
    last : str
        Which result was taken up last; empty for none.
    taken, undone : int
        How many were, and how many of them the guard put back.
    """

    last: str = ""
    taken: int = 0
    undone: int = 0

    def with_one(self, name: str, *, undone: bool) -> RoundsTaken:
        """Return it with one more."""
        return RoundsTaken(name, self.taken + 1, self.undone + undone)


@dataclass(frozen=True, eq=False)
class RoundChange:
    """What a round has changed of the model that the learner had saved.

    Parameters
    ----------
    name : str
        Of this result, unlike any other's.
    after : str
        `RoundsTaken.last` of the state that the round started from.
    change : LabelledWeights
        Differences; of tensors that hold whole numbers, and of the rows of new labels, the values themselves.
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
    """Return what has to be added to ``before`` to make ``now``, which may have more labels after the same ones.

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
                # A row that stood for nothing before has no difference either.
                fresh = slice(len(before.labels), len(now.labels))
                change[fresh] = value[fresh]
        changes[name] = change
    return LabelledWeights(changes, now.labels, now.head)


def applied(
    present: LabelledWeights, change: RoundChange, known: tuple[int, ...]
) -> LabelledWeights:
    """Return the present model with a round's change: what was learned meanwhile stays.

    A label that the present model has no row for is passed over.

    Parameters
    ----------
    present : LabelledWeights
        The learner's model, with rows for the round's new labels.
    change : RoundChange
        What the round has changed.
    known : tuple of int
        Labels that the learner knew before it made those rows: a new label that it has met meanwhile keeps its row.

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
    """The place in a learner's folder where rounds leave their results.

    A later result takes the place of one that nobody has taken yet: both start from the same saved state.

    Parameters
    ----------
    folder : path-like
        The learner's state folder.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        place = Path(folder) / "inbox"
        self._left, self._claimed = place / "round.state", place / "claimed.state"

    def leave(self, change: RoundChange) -> None:
        """Leave a result; OSError if the disk does not take it."""
        write_state(self._left, _KIND, change)

    def claim(self) -> RoundChange | None:
        """Return a result that waits, taken out of reach of later rounds until `done`; None if there is none.

        One that was claimed by a process that died is given again. One that cannot be read is deleted.
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
        """Delete what was claimed."""
        try:
            self._claimed.unlink(missing_ok=True)
        except OSError as error:
            _LOG.warning("cannot remove %s: %s", self._claimed, error.strerror)
