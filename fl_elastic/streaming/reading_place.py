"""Where in the model a stream's head reads, chosen by the first samples of the stream itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fl_elastic.errors import StreamDataError, StreamError
from fl_elastic.groups import Batch
from fl_elastic.profiling.profile_key import model_device
from fl_elastic.readout.choice import EXAMPLES
from fl_elastic.readout.place import joined, parse_places, places_of
from fl_elastic.readout.readout import Readout
from fl_elastic.streaming.body import Prepare
from fl_elastic.streaming.event_log import Event
from fl_elastic.streaming.write_ahead import log_bytes
from fl_elastic.training.place_sample import outputs_of
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
# Until it is chosen where to read, everything is in the log, and hardly anything in the store.
_MOST_BYTES = 2**25
# Places are not told apart by fewer, however long one waits.
_FEWEST = 64
_AT_ONCE = 64


def check_read(read: str, model: nn.Module | None = None) -> None:
    """Raise an error unless a head can be told to read there: `AUTO`, `LAST`, or names of places.

    Raises
    ------
    PlanError
        If it is no name of a place.
    StreamError
        If the model reads at places of its own already.
    """
    if read not in (AUTO, LAST):
        parse_places(read)
    if model is not None and read != LAST and isinstance(model, Readout):
        raise StreamError(
            f"the model reads {reads_of(model)} already: leave read out, or give the model that it was made from"
        )


def reads_of(model: nn.Module) -> str:
    """Return the names of the places where a model's head reads; `LAST` for what enters its last layer.

    >>> reads_of(nn.Linear(2, 2))
    'last'
    """
    return joined(model.places) if isinstance(model, Readout) else LAST


def kept_until_chosen(capacity_bytes: int) -> int:
    """Return the bytes that samples may take, beside a store of this capacity, until it is chosen where to read.

    >>> kept_until_chosen(2**17), kept_until_chosen(64 * 2**20)
    (65536, 33554432)
    """
    return max(log_bytes(capacity_bytes), min(capacity_bytes // 2, _MOST_BYTES))


def saved_readout(
    model: nn.Module, read: str, facts: Any, weights: Any, prepare: Prepare
) -> nn.Module:
    """Return the model that reads where the one did whose state was saved.

    Parameters
    ----------
    model : nn.Module
        As it was given.
    read : str
        What is asked for now.
    facts, weights : mapping
        What the classifier has saved.
    prepare : callable
        See `fl_elastic.streaming.body.WholeModel`.

    Raises
    ------
    StreamError
        If it reads elsewhere than it is to.
    """
    places = places_of(weights)
    if read not in (AUTO, places or LAST):
        raise StreamDataError(
            f"the saved head reads {places or 'what enters the last layer'}, not {read}: give the same, or another "
            "state_dir"
        )
    if not places:
        return model
    dtype, *shape = facts["like"]
    like = torch.from_numpy(np.zeros((1, *shape), np.dtype(dtype)))
    inputs = prepare(like.to(model_device(model)))
    return Readout(model, places, inputs, outputs_of(model, inputs))


@dataclass
class FirstSamples:
    """All that has come to a learner until it is chosen where its head reads.

    Parameters
    ----------
    read : str
        `AUTO`, or names of places, which need no label.
    most_features : int
        Of an example, of all chosen places together.
    events : list of Event
        Since the beginning of the stream.
    """

    read: str
    most_features: int
    events: list[Event] = field(default_factory=list)

    def readout(self, model: nn.Module, prepare: Prepare, *, now: bool = False) -> nn.Module | None:
        """Return the model that reads at the best places; None where too little is known of them as yet.

        The first `EXAMPLES` labelled samples choose them, in the order of their labels; twice as many, and so on,
        where they are all of one class. What is chosen does not depend on when it is asked for.

        Parameters
        ----------
        model : nn.Module
            Whose outputs are at least as many as there are labels.
        prepare : callable
            See `fl_elastic.streaming.body.WholeModel`.
        now : bool
            Whether fewer will do, as many as there are.
        """
        if self.read != AUTO:
            first = next((event.x for event in self.events if event.x is not None), None)
            if first is None:
                return None
            return self._cut(model, [(prepare(torch.from_numpy(first[:1])), torch.tensor([0]))])
        samples = list(self._labelled().values())
        count = _enough([y for _, y in samples], now)
        if not count:
            return None
        xs = [x for x, _ in samples[:count]]
        known = list(dict.fromkeys(y for _, y in samples))
        targets = torch.tensor([known.index(y) for _, y in samples[:count]])
        device = model_device(model)
        return self._cut(
            model,
            [
                (
                    prepare(torch.from_numpy(np.stack(xs[i : i + _AT_ONCE])).to(device)),
                    targets[i : i + _AT_ONCE],
                )
                for i in range(0, count, _AT_ONCE)
            ],
        )

    def _cut(self, model: nn.Module, batches: Sequence[Batch]) -> nn.Module:
        return readout_of(model, batches, self.read, most_features=self.most_features)[0]

    def ids_of(self, label: int) -> list[int]:
        """Return the ids of all samples of a class."""
        return sorted(number for number, (_, y) in self._labelled().items() if y == label)

    def _labelled(self) -> dict[int, tuple[NDArray[Any], int]]:
        """Return samples and their labels by number, in the order in which they were labelled."""
        xs: dict[int, NDArray[Any]] = {}
        labels: dict[int, int] = {}
        for event in self.events:
            facts = event.facts
            if "label" in facts:
                labels[facts["id"]] = facts["label"]
            elif event.x is not None:
                for number, (x, y) in enumerate(
                    zip(event.x, facts["y"], strict=True), facts["number"]
                ):
                    xs[number] = x
                    if y is not None:
                        labels[number] = y
        return {number: (xs[number], y) for number, y in labels.items() if number in xs}


def _enough(labels: Sequence[int], now: bool) -> int:
    """Return how many of the first labelled samples tell places apart; 0 where they do not.

    >>> _enough([0, 1] * 400, False), _enough([0] * 640 + [1], False), _enough([0, 1] * 40, True)
    (640, 0, 80)
    """
    count = EXAMPLES
    while count <= len(labels):
        if len(set(labels[:count])) > 1:
            return count
        count *= 2
    return len(labels) if now and len(labels) >= _FEWEST and len(set(labels)) > 1 else 0
