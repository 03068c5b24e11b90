"""Where a sample goes: to the store, to the next batches, or out of training's sight."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.streaming.guard import Guard, Row
from fl_elastic.streaming.head import ClassMap
from fl_elastic.streaming.recent import Recent
from fl_elastic.streaming.replay_loader import Pool
from fl_elastic.streaming.store import SampleStore
from fl_elastic.streaming.stored import Offer

__all__ = ["LateLabel", "StreamMemory"]

_LOG = logging.getLogger("fl_elastic")


@dataclass(frozen=True)
class LateLabel:
    """What a late label has found.

    Parameters
    ----------
    stored : bool
        Whether the sample was in the store.
    waited : bool
        Whether this is the first label that came of it.
    prediction : int or None
        What was predicted of it.
    """

    stored: bool
    waited: bool
    prediction: int | None = None


@dataclass(frozen=True, eq=False, slots=True)
class _Pending:
    """A sample that the store has not been offered yet, and what was predicted if it waits for its label."""

    offer: Offer
    waits: bool = False
    prediction: int | None = None


class StreamMemory:
    """The store of a stream and the newest samples in memory.

    Parameters
    ----------
    store : SampleStore
        Nobody else adds to it.
    guard : Guard
        Says what is held out.
    new, waiting : int
        See `Recent`.
    keeps_scores : bool
        Whether class scores are stored with each sample.

    Attributes
    ----------
    version : str or None
        What features belong to that are kept from now on; None for inputs.
    """

    def __init__(
        self, store: SampleStore, guard: Guard, *, new: int, waiting: int, keeps_scores: bool
    ) -> None:
        self.store = store
        self._recent = Recent(guard, new, waiting)
        self._keeps_scores = keeps_scores
        self._seen = store.seen
        self._pending: list[_Pending] = []
        self._ids: list[int | None] = []
        self._gathering = False
        self.version: str | None = None

    @property
    def held_out(self) -> list[Row]:
        """The window that training does not see."""
        return self._recent.held_out.rows

    @contextmanager
    def gathering(self) -> Iterator[list[int | None]]:
        """Offer what is kept meanwhile to the store at the end, together; give the list that then has their ids."""
        self._ids = []
        self._gathering = True
        try:
            yield self._ids
        finally:
            self._gathering = False
            self._settle()

    def keep(
        self, row: Row, scores: NDArray[np.float32], prediction: int | None, *, labelled: bool
    ) -> int | None:
        """Hold a sample out or offer it, within `gathering`; return where its id will stand, if it gets one.

        The id is None there if the store has not taken it.
        """
        if labelled:
            # Whose array it is may be filled with the next sample.
            row = replace(row, x=np.array(row.x))
            if self._recent.held_out.takes():
                self._offer(self._recent.held_out.hold(row))
                return None
            self._recent.new.append(row)
        offer = Offer(row.x, row.y, row.t, scores if self._keeps_scores else None)
        self._pending.append(_Pending(offer, not labelled, prediction))
        return len(self._ids) + len(self._pending) - 1

    def label(self, sample_id: int, y: int) -> LateLabel:
        """Give a stored sample its label; the first one makes it a new sample to learn from, or to hold out."""
        stored = self.store.label(sample_id, y)
        if not self._recent.is_waited_for(sample_id):
            return LateLabel(stored, waited=False)
        prediction = self._recent.answered(sample_id)
        found = self.store.take([sample_id])
        if len(found):
            row = Row(found.x[0], y, float(found.t[0]))
            if self._recent.held_out.takes():
                self.store.delete([sample_id])
                self._offer(self._recent.held_out.hold(row))
            else:
                self._recent.new.append(row)
        return LateLabel(stored, waited=True, prediction=prediction)

    def world_changed(self) -> None:
        """Let the held-out samples go to the store: they are of a world that is no more."""
        self._offer(self._recent.held_out.clear())

    def adapted(self) -> None:
        """Forget which samples were new."""
        self._recent.new.clear()

    def pool(self, classes: ClassMap) -> Pool | None:
        """Return what batches are made of; None if there is no labelled sample."""
        rows = list(self._recent.new)
        x = np.stack([row.x for row in rows]) if rows else np.zeros(0, np.float32)
        y = np.array([row.y for row in rows], np.int64)
        pool = Pool(x, y, self.store, classes, self.version)
        return pool if rows or len(self.store.sample(1, version=self.version)) else None

    def keep_to(self, version: str | None, before: str | None) -> None:
        """Keep features of this version from now on, and delete those of all others.

        Parameters
        ----------
        version : str or None
            The present one; None where inputs are kept.
        before : str or None
            That of the samples in memory; None if there are none.
        """
        self._settle()
        self.version = version
        if version is None:
            return
        if gone := self.store.delete(other_than_version=version):
            _LOG.warning("%s stored features of another frozen part were deleted", gone)
        if before is not None and before != version:
            self._recent.forget_samples()

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return what is in memory alone."""
        return self._recent.to_arrays()

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take over what `to_arrays` gave."""
        self._recent.restore(arrays)

    def _offer(self, rows: Sequence[Row]) -> None:
        """Offer samples to the store, later if more are gathered."""
        self._pending += [_Pending(Offer(row.x, row.y, row.t)) for row in rows]
        if not self._gathering:
            self._settle()

    def _settle(self) -> None:
        """Offer what is pending, and wait for the labels of those that have none."""
        pending, self._pending = self._pending, []
        placed = self.store.offer([each.offer for each in pending], self.version or "")
        for each, (number, _) in zip(pending, placed, strict=True):
            self._ids.append(number)
            if number is None:
                continue
            if number <= self._seen:
                # A damaged file was put aside, and the fresh one counts from the start.
                self._recent.forget_waiting()
            self._seen = number
            if each.waits:
                self._recent.wait(number, each.prediction)
