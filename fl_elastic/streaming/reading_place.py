"""Where in the model a stream's head reads, chosen by the first samples of the stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fl_elastic.errors import StreamDataError, StreamError
from fl_elastic.groups import Batch
from fl_elastic.profiling.profile import model_device
from fl_elastic.readout.choice import EXAMPLES
from fl_elastic.readout.first_pass import FirstPass
from fl_elastic.readout.place import parse_places, places_of
from fl_elastic.readout.readout import Readout
from fl_elastic.streaming.body import Prepare
from fl_elastic.streaming.classifier import ClassifierState
from fl_elastic.streaming.event_log import Event
from fl_elastic.streaming.write_ahead import log_bytes
from fl_elastic.training.read_out import readout_of

__all__ = [
    "AUTO",
    "LAST",
    "FirstSamples",
    "check_read",
    "kept_until_chosen",
    "reads_of",
    "saved_readout",
]

AUTO, LAST = "auto", "last"
# Until the place is chosen, all samples are in the log and hardly any in the store.
_MOST_BYTES = 2**25
# Labelled samples without which no place is chosen, and samples after which the choice is not delayed further.
_FEWEST, _MOST_SAMPLES = 64, 8 * EXAMPLES
_AT_ONCE = 64


def check_read(read: str, model: nn.Module | None = None) -> None:
    """Raise an error unless a head can read there: `AUTO`, `LAST`, or names of places.

    Raises
    ------
    PlanError
        If it does not name places.
    StreamError
        If the model already reads at places of its own.
    """
    if read not in (AUTO, LAST):
        parse_places(read)
    if model is not None and read != LAST and isinstance(model, Readout):
        raise StreamError(
            f"the model reads {reads_of(model)} already: leave read out, or give the model that it was made from"
        )


def reads_of(model: nn.Module) -> str:
    """Return the names of the places where a model's head reads; `LAST` for the input of its last layer.

    >>> reads_of(nn.Linear(2, 2))
    'last'
    """
    return str(model.reading) if isinstance(model, Readout) else LAST


def kept_until_chosen(capacity_bytes: int) -> int:
    """Return the bytes that samples may take beside a store of this capacity until the place to read is chosen.

    >>> kept_until_chosen(2**17), kept_until_chosen(64 * 2**20)
    (131072, 33554432)
    """
    return max(log_bytes(capacity_bytes), min(capacity_bytes, _MOST_BYTES))


def saved_readout(
    model: nn.Module, read: str, state: ClassifierState, prepare: Prepare
) -> nn.Module:
    """Return the model that reads at the places of the saved state.

    Parameters
    ----------
    model : nn.Module
        The model that the caller gave.
    read : str
        The places that the caller asks for now.
    state : ClassifierState
        Saved state of the classifier.
    prepare : callable
        See `fl_elastic.streaming.body.WholeModel`.

    Raises
    ------
    StreamError
        If the saved head reads elsewhere than asked for.
    """
    places = places_of(state.weights)
    if read not in (AUTO, places or LAST):
        raise StreamDataError(
            f"the saved head reads {places or 'what enters the last layer'}, not {read}: give the same, or another "
            "state_dir"
        )
    if not places:
        return model
    if state.like is None:
        raise StreamDataError("the saved head reads inside of the model and has seen no sample")
    like = torch.from_numpy(state.like.zeros()[None])
    inputs = prepare(like.to(model_device(model)))
    return Readout(model, places, inputs, FirstPass.of(model, (inputs, inputs)).outputs)


class FirstSamples:
    """All samples and labels of a learner until the place where its head reads is chosen.

    Parameters
    ----------
    read : str
        `AUTO`, or names of places, which can be used without any label.
    most_features : int
        Most features of an example, all chosen places together.
    events : iterable of Event
        Events before a restart.

    Attributes
    ----------
    events : list of Event
        All events since the beginning of the stream.
    """

    def __init__(self, read: str, most_features: int, events: Iterable[Event] = ()) -> None:
        self.read, self.most_features = read, most_features
        self.events: list[Event] = []
        self._clear()
        for event in events:
            self.add(event)

    def _clear(self) -> None:
        self._xs: dict[int, NDArray[Any]] = {}
        self._labels: dict[int, int] = {}
        self._due = EXAMPLES

    def __contains__(self, number: object) -> bool:
        return number in self._xs

    @property
    def is_full(self) -> bool:
        """Whether enough samples have arrived for the choice, which is then not delayed further."""
        return len(self._xs) >= _MOST_SAMPLES

    def add(self, event: Event) -> None:
        """Add an event."""
        self.events.append(event)
        facts = event.facts
        if "label" in facts:
            self._label(facts["id"], facts["label"])
        elif event.x is not None:
            for number, (x, y) in enumerate(zip(event.x, facts["y"], strict=True), facts["number"]):
                self._xs[number] = x
                if y is not None:
                    self._label(number, y)

    def drop_last(self) -> None:
        """Remove the event that was added last."""
        events, self.events = self.events[:-1], []
        self._clear()
        for event in events:
            self.add(event)

    def readout(self, model: nn.Module, prepare: Prepare, *, now: bool = False) -> nn.Module | None:
        """Return the model that reads at the best places; None if there are too few labelled samples as yet.

        The first `EXAMPLES` labelled samples, in the order of their labels, decide; if they all have one class,
        twice as many, and so on. The choice does not depend on when this is called.

        Parameters
        ----------
        model : nn.Module
            A model with at least as many outputs as there are labels.
        prepare : callable
            See `fl_elastic.streaming.body.WholeModel`.
        now : bool
            Whether to choose with the samples that are there, even if they are fewer.
        """
        if self.read != AUTO:
            if not self._xs:
                return None
            first = torch.from_numpy(next(iter(self._xs.values()))[None])
            return self._cut(model, [(prepare(first.to(model_device(model))), torch.tensor([0]))])
        if not now and len(self._labels) < self._due:
            return None
        samples = [(self._xs[each], y) for each, y in self._labels.items() if each in self._xs]
        count = _enough([y for _, y in samples], now)
        if not count:
            while self._due <= len(self._labels):
                self._due *= 2
            return None
        xs = [x for x, _ in samples[:count]]
        known = list(dict.fromkeys(y for _, y in samples))
        targets = torch.tensor([known.index(y) for _, y in samples[:count]])
        batches = []
        for start in range(0, count, _AT_ONCE):
            some = torch.from_numpy(np.stack(xs[start : start + _AT_ONCE]))
            inputs = prepare(some.to(model_device(model)))
            batches.append((inputs, targets[start : start + _AT_ONCE]))
        return self._cut(model, batches)

    def ids_of(self, label: int) -> list[int]:
        """Return the ids of all samples of a class."""
        return sorted(number for number, y in self._labels.items() if y == label)

    def _label(self, number: int, label: int) -> None:
        if self._labels.get(number, label) != label:
            # A sample that was already considered may have another class now.
            self._due = EXAMPLES
        self._labels[number] = label

    def _cut(self, model: nn.Module, batches: Sequence[Batch]) -> nn.Module:
        return readout_of(model, batches, self.read, most_features=self.most_features)[0]


def _enough(labels: Sequence[int], now: bool) -> int:
    """Return how many of the first labelled samples decide between places; 0 if they are too few yet.

    >>> _enough([0, 1] * 400, False), _enough([0] * 640 + [1], False), _enough([0, 1] * 40, True)
    (640, 0, 80)
    """
    count = EXAMPLES
    while count <= len(labels):
        if len(set(labels[:count])) > 1:
            return count
        count *= 2
    return len(labels) if now and len(labels) >= _FEWEST and len(set(labels)) > 1 else 0
