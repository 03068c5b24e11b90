"""A batch of samples that arrive together: their names, the model's predictions, and the result for each."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import StreamError
from fl_elastic.streaming.body import Look
from fl_elastic.streaming.classifier import Classifier
from fl_elastic.streaming.intake import Refused, checked_batch, checked_sample
from fl_elastic.streaming.sources import SourcePosition

# Number of sender names that are kept.
_NAMES = 1000

# Most samples of one forward pass: a larger batch only needs more memory.
_TOGETHER = 256


@dataclass(frozen=True)
class Observation:
    """The result for one sample, or for its label.

    Parameters
    ----------
    prediction : int or None
        Label predicted before the model learned from the sample; None if no class was known or the sample was
        refused.
    correct : bool or None
        Whether the prediction was right; None without a label.
    drift, adapted, rolled_back : bool
        Whether the sample led to a drift, to an adaptation, or to one that was undone.
    sample_id : int or None
        Id with which to give the label later. None if the sample was refused, would be lost if the process were
        killed, or was no longer in the store when its label came; in the last case its prediction counts in the
        accuracy, but nothing is learned from it.
    again : bool
        Whether the sample was known already by its sender's name; it is not counted again, but its label is given
        to it.
    refused : str
        Reason for refusing it; empty if it was accepted.
    """

    prediction: int | None = None
    correct: bool | None = None
    drift: bool = False
    adapted: bool = False
    rolled_back: bool = False
    sample_id: int | None = None
    again: bool = False
    refused: str = ""


@dataclass(frozen=True, eq=False)
class Arrivals:
    """Samples that arrive together, each with a label and a name; None for a label or name that was not given."""

    xs: Sequence[Any]
    ys: Sequence[Any]
    names: Sequence[str | None]

    @classmethod
    def checked(cls, xs: Any, ys: Any, names: Sequence[str | None] | None) -> Arrivals:
        """Return checked arrivals; raise StreamError if the numbers of samples, labels and names differ."""
        samples, labels = checked_batch(xs, ys)
        called = [None] * len(samples) if names is None else list(names)
        if len(called) != len(samples):
            raise StreamError(f"{len(samples)} samples and {len(called)} names: give one name each")
        return cls(samples, labels, called)

    def before(self, count: int) -> Arrivals:
        """Return the first ``count`` arrivals."""
        return Arrivals(self.xs[:count], self.ys[:count], self.names[:count])

    def after(self, count: int) -> Arrivals:
        """Return the arrivals without the first ``count``."""
        return Arrivals(self.xs[count:], self.ys[count:], self.names[count:])


@dataclass(frozen=True, eq=False)
class Arrived:
    """Result of handling one sample.

    Parameters
    ----------
    seen : Observation
        The observation that is returned for the sample.
    number : int
        The sample's number; 0 if it was refused.
    x, label, name
        The sample, label and name as taken in; sample and name are None for a sample that was known already.
    """

    seen: Observation
    number: int = 0
    x: NDArray[Any] | None = None
    label: int | None = None
    name: str | None = None

    @property
    def brings_label(self) -> bool:
        """Whether the sample was known already and was sent again with a label."""
        return self.seen.again and self.label is not None

    def unkept(self) -> Arrived:
        """Return a copy without a sample id: the sample would be lost if the process were killed."""
        return replace(self, seen=replace(self.seen, sample_id=None))


def noted_arrivals(
    seen: Sequence[Arrived], position: SourcePosition | None
) -> tuple[dict[str, Any], NDArray[Any] | None]:
    """Return the facts and the samples to write to the log; both are empty if nothing has changed."""
    taken = [each for each in seen if each.x is not None]
    refused = [each.seen.refused for each in seen if each.seen.refused]
    facts: dict[str, Any] = {"refused": refused} if refused else {}
    if taken:
        facts |= {
            "number": taken[0].number,
            "y": [each.label for each in taken],
            "names": [each.name for each in taken],
        }
    if facts and position is not None:
        facts["position"] = [position.source, position.at]
    return facts, np.stack([each.x for each in taken if each.x is not None]) if taken else None


class SenderIds:
    """The newest names that senders gave their samples, so that a sample that is sent again is recognised.

    Parameters
    ----------
    known : mapping of str to int
        Names and sample numbers from before a restart, oldest first.

    Examples
    --------
    >>> names = SenderIds()
    >>> for number, name in enumerate(["door-1", "door-2", "door-3"], start=1):
    ...     names.add(name, number)
    >>> names.number("door-1"), names.number("door-3"), names.known
    (1, 3, {'door-1': 1, 'door-2': 2, 'door-3': 3})
    """

    def __init__(self, known: Mapping[str, int] | None = None) -> None:
        self._known = dict(known or {})

    def add(self, name: str, number: int) -> None:
        """Remember the sample number of a name."""
        self._known[name] = number
        while len(self._known) > _NAMES:
            del self._known[next(iter(self._known))]

    def drop(self, numbers: Collection[int]) -> None:
        """Forget the names of these samples: they were not kept, so that their sender may send them again."""
        self._known = {name: each for name, each in self._known.items() if each not in numbers}

    def number(self, name: str) -> int | None:
        """Return the sample number of a name; None if the name is new or was forgotten."""
        return self._known.get(name)

    @property
    def known(self) -> dict[str, int]:
        """Every remembered name with its sample number, oldest first."""
        return dict(self._known)


class LookAhead:
    """Runs the model on samples in order, on several at once as long as the model does not change.

    Parameters
    ----------
    classifier : Classifier
        The model; it may learn labels between two calls.
    xs : sequence
        Samples as they arrived, unchecked.
    """

    def __init__(self, classifier: Classifier, xs: Sequence[Any]) -> None:
        self._classifier, self._xs = classifier, xs
        self._samples: dict[int, NDArray[Any]] = {}
        self._looks: dict[int, Look] = {}
        self._model: object = None
        # Samples before this index go through the model one by one, because it refused them as a batch.
        self._alone = 0

    def sample(self, index: int) -> NDArray[Any]:
        """Return a checked sample; raises Refused if it is invalid."""
        if index not in self._samples:
            self._samples[index] = checked_sample(self._xs[index], self._classifier.like)
        return self._samples[index]

    def look(self, index: int) -> Look:
        """Return a sample's kept form and its class scores; raises Refused if the model does not accept it."""
        classifier = self._classifier
        if self._model != self._model_now():
            self._looks.clear()
        if index not in self._looks:
            if classifier.like is None or index < self._alone:
                return classifier.look(self.sample(index))
            self._look_together(index)
            self._model = self._model_now()
        return self._looks.pop(index) if index in self._looks else self.look(index)

    def _model_now(self) -> object:
        """Return a key that changes with the number of head outputs and with the frozen part."""
        return id(self._classifier.body), self._classifier.width

    def _look_together(self, index: int) -> None:
        end = min(index + _TOGETHER, len(self._xs))
        indices = [each for each in range(index, end) if self._is_valid(each)]
        try:
            kept, scores = self._classifier.looks(np.stack([self._samples[p] for p in indices]))
        except Refused:
            self._alone = end
            return
        self._looks = {each: (kept[i], scores[i]) for i, each in enumerate(indices)}

    def _is_valid(self, index: int) -> bool:
        try:
            self.sample(index)
        except Refused:
            return False
        return True
