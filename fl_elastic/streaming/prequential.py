"""Prequential learning: predict each sample, then score the prediction, then learn; events can be replayed."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from numpy.typing import NDArray

from fl_elastic.given import whole
from fl_elastic.streaming.arrivals import Arrivals, Arrived, LookAhead, Observation, SenderIds
from fl_elastic.streaming.classifier import Classifier
from fl_elastic.streaming.drift import DriftMemory
from fl_elastic.streaming.event_log import Event
from fl_elastic.streaming.guard import Row
from fl_elastic.streaming.intake import Refused, checked_label
from fl_elastic.streaming.learning_rule import LearningRule
from fl_elastic.streaming.progress import Progress, StreamRecord
from fl_elastic.streaming.sources import SourcePosition
from fl_elastic.streaming.stream_memory import StreamMemory

_LOG = logging.getLogger("fl_elastic")
# Factor by which the weight of a sample in the prequential accuracy falls with each next sample.
_FADING = 0.99
NO_SUCH_SAMPLE = "no such sample"
"""Reason for refusing a label whose sample is neither kept nor waiting for its first label."""


class Prequential:
    """Handles the events of a stream: samples and labels that arrive.

    It takes no training steps and writes only to the store. So after a restart the events since the last saved
    state can be handled again, with the same result.

    Parameters
    ----------
    classifier : Classifier
        Predicts samples; new labels are added to it.
    rule : LearningRule
        Learns from labelled samples.
    memory : StreamMemory
        Keeps samples.
    drift : DriftMemory
        Watches the errors.
    names : SenderIds
        Recognises samples that are sent again.
    progress, record
        Counters and record of the stream.

    Attributes
    ----------
    unsaved : bool
        Whether a change should be saved soon, such as a new class.
    """

    def __init__(
        self,
        classifier: Classifier,
        rule: LearningRule,
        memory: StreamMemory,
        drift: DriftMemory,
        names: SenderIds,
        progress: Progress,
        record: StreamRecord,
    ) -> None:
        self._classifier, self._rule, self._memory = classifier, rule, memory
        self._drift, self._names = drift, names
        self._progress, self._record = progress, record
        self.unsaved = self._told = False
        self.learn_stored_labels()

    def observe(self, batch: Arrivals) -> list[Arrived]:
        """Handle samples; return the result for each, up to the first that is a known sample with a label.

        The caller must then pass this label to `label`, because it is an event of its own.
        """
        with self._memory.unsettled():
            return self._observed(batch.before(self._first_known(batch)))

    def label(
        self, sample_id: int | str, y: int
    ) -> tuple[Observation, Mapping[str, Any], NDArray[Any] | None]:
        """Handle the label of a sample; return the result, and the event's facts and sample for the log."""
        number = self.number(sample_id)
        try:
            label = checked_label(y)
            if label is None:
                raise Refused("there is no label: give the class number of the sample")
            if number is None:
                raise Refused(NO_SUCH_SAMPLE)
            self._classifier.refuse_unlearnable(label)
        except Refused as refused:
            seen = self._refused(str(refused))
            return seen, {"refused": [seen.refused]}, None
        row = self._memory.find(number)
        recent = self._memory.recent
        if row is None and not recent.holds_out(number) and number not in recent.waiting:
            return Observation(sample_id=number, refused=NO_SUCH_SAMPLE), {}, None
        with self._memory.unsettled():
            seen = self._labelled(number, label, row)
        facts = {"id": number, "label": label}
        return (seen, facts, None) if row is None else (seen, facts | {"was": row.y}, row.x)

    def number(self, sample_id: int | str) -> int | None:
        """Return the number of a sample by its id or name; None if there cannot be such a sample."""
        named = self._names.number(sample_id) if isinstance(sample_id, str) else sample_id
        # A rounded id would be that of another sample.
        number = whole(named)
        return number if number is not None and 0 < number < 2**63 else None

    def drop(self, numbers: Collection[int]) -> None:
        """Discard the samples of the last event, which could not be logged."""
        self._memory.drop(numbers)
        self._rule.drop(numbers)
        self._names.drop(numbers)

    def update(self, *, guarded: bool = True) -> str | None:
        """Let the rule update the model; return why this was undone, empty if kept, None without a change."""
        undone = self._rule.update(self._memory.held_out, guarded=guarded)
        if undone is not None:
            # These samples are not needed for an adaptation.
            self._memory.adapted()
        if undone:
            self._progress.rolled_back += 1
            _LOG.info("an update of the model was undone: %s", undone)
        return undone

    def learn_stored_labels(self) -> None:
        """Learn every label that is in the store, including those of samples after the last save."""
        for label in self._memory.store.classes:
            if label is not None:
                self._learn_label(label)

    def replay(self, events: Iterable[Event]) -> None:
        """Handle the events after the saved state again, then learn later samples that are only in the store."""
        with self._memory.again():
            for event in events:
                self._repeat(event)
            known = self._memory.number
        for some in self._memory.stored(known):
            for row in some:
                self._rule.learn(row)
            self.unsaved |= self.update() is not None
        # Also without such samples: a head in closed form may be solved from sums over data from before the stream.
        self.update()

    def saved(self) -> None:
        """Note that there was an attempt to save."""
        self.unsaved = False

    def _repeat(self, event: Event) -> None:
        facts = event.facts
        self._memory.at_event(event.number)
        for why in facts.get("refused", ()):
            self._progress.refused(why)
        if "position" in facts:
            self._memory.reached(SourcePosition(*facts["position"]))
        if "label" in facts:
            number = facts["id"]
            row = None if event.x is None else Row(event.x, facts.get("was"), number)
            self._labelled(number, facts["label"], row)
        elif event.x is not None:
            arrivals = Arrivals(list(event.x), facts["y"], facts["names"])
            self._observed(arrivals, facts["number"])
        self.update()

    def _observed(self, batch: Arrivals, first: int | None = None) -> list[Arrived]:
        """Handle samples; return the result for each.

        Parameters
        ----------
        batch : Arrivals
            Samples, labels and names.
        first : int, optional
            Number of the first one, if it was assigned before a restart.
        """
        ahead, found = LookAhead(self._classifier, batch.xs), []
        for index in range(len(batch.xs)):
            if first is not None:
                self._memory.go_to(first + index - 1)
            found.append(self._arrived(ahead, batch, index))
        if first is not None:
            self._memory.go_to(first + len(batch.xs) - 1)
        return found

    def _first_known(self, batch: Arrivals) -> int:
        """Return the number of samples up to the first known one with a label, included; else of all."""
        earlier = set[str]()
        for place, (name, y) in enumerate(zip(batch.names, batch.ys, strict=True), 1):
            if name is not None:
                known = name in earlier or self._names.number(name) is not None
                if known and y is not None:
                    return place
                earlier.add(name)
        return len(batch.xs)

    def _arrived(self, ahead: LookAhead, batch: Arrivals, index: int) -> Arrived:
        y, name = batch.ys[index], batch.names[index]
        known = None if name is None else self._names.number(name)
        try:
            label = checked_label(y)
            sample = ahead.sample(index)
            if known is None:
                self._classifier.refuse_unlearnable(label)
            before = self._classifier.version
            looked, scores = ahead.look(index)
            kept = looked if known is not None else self._rule.kept(looked)
        except Refused as refused:
            return Arrived(self._refused(str(refused)))
        prediction = self._classifier.predicted(scores)
        if known is not None:
            again = Observation(prediction, sample_id=known, again=True)
            return Arrived(again, known, label=label)
        if before != self._classifier.version:
            self._memory.keep_to(self._classifier.version, before)
        self._progress.observed += 1
        number = self._memory.next_number()
        if name is not None:
            self._names.add(name, number)
        correct, drift = None, False
        if label is not None:
            correct, drift = self._scored(prediction, label, learned=True)
        fits = self._memory.keep(Row(kept, label, number), prediction)
        said = Observation(prediction, correct, drift, sample_id=number if fits else None)
        return Arrived(said, number, sample, label, name)

    def _labelled(self, number: int, label: int, row: Row | None) -> Observation:
        late = self._memory.label(number, label, row)
        if late.waited:
            correct, drift = self._scored(late.prediction, label, learned=late.here)
            here = number if late.here else None
            return Observation(late.prediction, correct, drift, sample_id=here)
        if late.here:
            # After a restart the label would be found in the store, or in the window.
            self._learn_label(label)
        if row is not None and row.y is None:
            self._progress.unscored()
            if not self._told:
                self._told = True
                _LOG.warning(
                    "the label of sample %s came so late that its prediction is no longer known, because too many "
                    "unlabelled samples followed: it is learned, but not counted in the accuracy", number,
                )  # fmt: skip
        elif row is not None and row.y != label:
            self._rule.relabel(row, label)
        return Observation(sample_id=number)

    def _scored(self, prediction: int | None, label: int, *, learned: bool) -> tuple[bool, bool]:
        """Count a prediction whose label is known; return whether it was correct, and whether there is a drift."""
        correct, progress = prediction == label, self._progress
        drift = self._drift.update(float(not correct))
        progress.scored(correct, drift, _FADING, learned=learned)
        if self._record.scored(correct, drift, progress.labelled):
            store = self._memory.store
            self._record.mark(progress.labelled, store.used_bytes, store.classes)
        if drift:
            self._rule.drifted()
            self._memory.drifted()
        self._learn_label(label)
        return correct, drift

    def _learn_label(self, label: int) -> None:
        self.unsaved |= self._classifier.learn(label)

    def _refused(self, why: str) -> Observation:
        self._progress.refused(why)
        return Observation(refused=why)
