"""Distribution of samples to the store, to the next training batches, or to the held-out window."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np

from fl_elastic.streaming.event_log import IngestedSamples
from fl_elastic.streaming.growing_head import ClassMap
from fl_elastic.streaming.guard import Guard, RecentSamples, Row
from fl_elastic.streaming.replay_loader import Pool
from fl_elastic.streaming.sources import SourcePosition, with_position
from fl_elastic.streaming.store.changes import Change, Offer, Relabelled, Withdrawn
from fl_elastic.streaming.store.sample_store import SampleStore

_LOG = logging.getLogger("fl_elastic")
_INGESTED, _POSITIONS = "ingested", "positions"
# Most changes that wait to be written together, and most bytes of their samples. If written one by one, each change
# would rewrite a page of every index.
_MOST_CHANGES, _MOST_BYTES = 256, 2**20


@dataclass(frozen=True)
class LateLabel:
    """Result of a late label.

    Parameters
    ----------
    here : bool
        Whether the sample was in the store or held out.
    waited : bool
        Whether the sample's prediction was kept until this label, its first one; only the newest are kept.
    prediction : int or None
        The prediction for the sample.
    """

    here: bool
    waited: bool
    prediction: int | None = None


class StreamMemory:
    """The store of a stream and the newest samples in memory.

    Changes of the store are collected and written together. The same transaction records which samples were offered
    to the store, so that none is offered twice, even if the process is killed.

    Parameters
    ----------
    store : SampleStore
        The store; no other object may add samples to it.
    guard : Guard
        Decides which samples are held out.
    learned : callable
        Called with each labelled sample when it may be learned from: when it arrives, or when it leaves the window.
    recent : RecentSamples
        The newest samples.
    number : int
        Number of the newest sample.
    events : int
        Number of the learner's events, including the one being handled.
    positions : mapping
        Position of each source, by name of the source.

    Attributes
    ----------
    version : str or None
        Version of the features that are kept; None if inputs are kept.
    """

    def __init__(
        self,
        store: SampleStore,
        guard: Guard,
        learned: Callable[[Row], object],
        *,
        recent: RecentSamples,
        number: int,
        events: int,
        positions: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self.store, self._guard, self._learned = store, guard, learned
        self.recent, self.number, self.events, self.positions = recent, number, events, positions
        self._pending: list[tuple[str, Change]] = []
        self._bytes = 0
        self._given, self._waits = IngestedSamples(), False
        self.version: str | None = None
        store.settled_by(self.settle)

    @property
    def held_out(self) -> list[Row]:
        """The held-out window, on which the model is not trained."""
        return self.recent.held_out

    @property
    def is_full(self) -> bool:
        """Whether so many changes are collected that they should be written (`settle`)."""
        return len(self._pending) >= _MOST_CHANGES or self._bytes >= _MOST_BYTES

    def keep(self, row: Row, prediction: int | None) -> bool:
        """Hold a sample out or offer it to the store; return whether it can fit into a store of this capacity."""
        # Copied, because the caller may reuse the array for the next sample.
        row = replace(row, x=np.array(row.x))
        if row.y is not None:
            if self.recent.count_labelled(self._guard):
                self._let_go(self.recent.hold(row, self._guard))
                return True
            self.recent.add(row)
            self._learned(row)
        else:
            self.recent.wait(row.number, prediction)
        self._give([row])
        return self.store.fits(row.x.nbytes)

    def drop(self, numbers: Collection[int]) -> None:
        """Discard these samples, which could not be logged, before they reach the store."""
        self._pending = [each for each in self._pending if each[1].number not in numbers]

    def find(self, sample_id: int) -> Row | None:
        """Return a stored sample; None if it is not in the store."""
        found = self.store.found([sample_id])
        row = Row(found.x[0], found.y.tolist()[0], sample_id) if len(found) else None
        for _, each in self._pending:
            if each.number == sample_id and isinstance(each, Offer):
                # The sample as it would be read back from the store.
                x = self.store.as_kept(np.asarray(each.x))
                row = Row(x, each.y, sample_id)
            elif each.number == sample_id and isinstance(each, Relabelled) and row is not None:
                row = replace(row, y=each.y)
            elif each.number == sample_id and isinstance(each, Withdrawn):
                row = None
        return row

    def label(self, sample_id: int, y: int, row: Row | None) -> LateLabel:
        """Give a sample its label; after its first label the sample is learned from or held out.

        A second label corrects the first one in the store, in the list of new samples, or in the held-out window.

        Parameters
        ----------
        sample_id, y : int
            Number of the sample, and its label.
        row : Row or None
            Result of `find`, now or before a restart.
        """
        waited = sample_id in self.recent.waiting
        if not waited and (row is None or row.y is not None):
            if row is not None:
                self._change(Relabelled(sample_id, y))
            self.recent.relabel(sample_id, y)
            return LateLabel(row is not None or self.recent.holds_out(sample_id), waited=False)
        prediction = self.recent.waiting.pop(sample_id, None)
        if row is not None:
            row = replace(row, y=y)
            # The store may hold the sample as it was before this label, or after it.
            known = self.events <= self._given.events and self._given.has(sample_id)
            if self.recent.count_labelled(self._guard):
                if not known:
                    self._change(Withdrawn(sample_id))
                    if self._given.number:
                        self._given = self._given.without(sample_id)
                self._let_go(self.recent.hold(row, self._guard))
            else:
                self.recent.add(row)
                self._learned(row)
                self._change(Relabelled(sample_id, y))
                if sample_id in self._given.beside:
                    self._give([row])
        return LateLabel(row is not None, waited=waited, prediction=prediction)

    def known(self, numbers: Iterable[int]) -> list[Row]:
        """Return those of these samples that are stored or held out, labelled or not."""
        wanted = list(dict.fromkeys(numbers))
        self.settle()
        found = self.store.take(wanted)
        rows = [
            Row(x, y, number)
            for number, x, y in zip(found.ids.tolist(), found.x, found.y.tolist(), strict=True)
        ]
        here = {row.number for row in rows}
        beside = [*self.held_out, *self.recent.new]
        return rows + [
            row
            for number, row in {row.number: row for row in beside}.items()
            if number in wanted and number not in here
        ]

    def stored(self, after: int) -> Iterator[list[Row]]:
        """Yield the stored labelled samples whose number is above ``after``, in order, several at a time."""
        found = self.store.ids(version=self.version)
        ids = sorted(found[found > after].tolist())
        for start in range(0, len(ids), _MOST_CHANGES):
            yield self.known(ids[start : start + _MOST_CHANGES])

    def drifted(self) -> None:
        """Release the held-out samples to the store after a drift, because they are out of date."""
        self._let_go(self.recent.release())

    def adapted(self) -> None:
        """Empty the list of new samples, after an adaptation."""
        self.recent.new.clear()

    def pool(self, classes: ClassMap) -> Pool | None:
        """Return the pool from which batches are drawn; None if there is no labelled sample."""
        rows = list(self.recent.new)
        x = np.stack([row.x for row in rows]) if rows else np.zeros(0, np.float32)
        y = np.array([row.y for row in rows], np.int64)
        pool = Pool(x, y, self.store, classes, self.version)
        return pool if rows or len(self.store.ids(version=self.version)) else None

    def keep_to(self, version: str | None, before: str | None) -> None:
        """Keep features of this version from now on, and delete those of all others.

        Parameters
        ----------
        version : str or None
            The present version; None if inputs are kept.
        before : str or None
            Version of the samples in memory; None if there are none.
        """
        self.settle()
        self.version = version
        if version is None:
            return
        self._pending = [each for each in self._pending if each[0] == version]
        if gone := self.store.delete(other_than_version=version):
            _LOG.warning("%s stored features of another frozen part were deleted", gone)
        if before is not None and before != version:
            self.recent.forget_samples()

    def next_number(self) -> int:
        """Assign and return the number of a new sample, which from now on is the newest."""
        self.number += 1
        return self.number

    def go_to(self, number: int) -> None:
        """Continue numbering after a sample that was numbered before a restart."""
        self.number = number

    def reached(self, position: SourcePosition) -> None:
        """Record the position of a source."""
        self.positions = with_position(self.positions, position)

    def at_event(self, number: int) -> None:
        """Record the number of the event that is being handled."""
        self.events = number

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within this context, repeat the events after the restored state; offer no sample to the store twice."""
        self._given = given = IngestedSamples.from_text(self.store.noted(_INGESTED))
        ahead = _positions(self.store.noted(_POSITIONS))
        with self.unsettled():
            yield
        # Happens only if an event was lost: the sample has left the window without a record.
        for row in [row for row in self.held_out if self._given.has(row.number)]:
            self.held_out.remove(row)
            self._learned(row)
        self._given = IngestedSamples()
        if given.number > self.number:
            # The samples in between are only in the store, for example after a power cut or without a state.
            _LOG.warning(
                "%s samples that the store was given are not in the learner's state: they are not read again; "
                "to learn them anew, start with another state folder",
                given.number - self.number,
            )
            self.number, self.positions = given.number, ahead
        self.number = max(self.number, int(self.store.noted("last_id") or 0))

    @contextmanager
    def unsettled(self) -> Iterator[None]:
        """Within this context, write nothing to the store, so that no change is stored before it is logged."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def settle(self) -> None:
        """Write the collected changes to the store."""
        if self._waits or not self._pending:
            return
        pending, self._pending, self._bytes = self._pending, [], 0
        for version, some in groupby(pending, key=itemgetter(0)):
            self.store.change([change for _, change in some], version, self._note)

    def _note(self, left: Sequence[Change]) -> dict[str, object]:
        """Return the facts to store in the transaction after which only the changes in ``left`` remain."""
        beside = [row.number for row in self.held_out]
        beside += [each.number for each in left if isinstance(each, Offer) and each.number]
        return {
            _INGESTED: IngestedSamples.of(self.number, beside, self.events).to_text(),
            _POSITIONS: json.dumps(self.positions, separators=(",", ":")),
        }

    def _let_go(self, rows: Sequence[Row]) -> None:
        """Offer samples that have left the window to the store, and learn them."""
        self._give(rows)
        for row in rows:
            self._learned(row)

    def _give(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if not self._given.has(row.number):
                self._change(Offer(row.x, row.y, row.number or None))

    def _change(self, change: Change) -> None:
        self._pending.append((self.version or "", change))
        self._bytes += np.asarray(change.x).nbytes if isinstance(change, Offer) else 0


def _positions(text: str) -> Mapping[str, Mapping[str, Any]]:
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
