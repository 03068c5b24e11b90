"""A batch of samples that arrive together: their names, the model's predictions, and what came of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import StreamError
from fl_elastic.streaming.body import Look
from fl_elastic.streaming.classifier import Classifier
from fl_elastic.streaming.intake import Refused, checked_batch, checked_sample
from fl_elastic.streaming.observation import Observation
from fl_elastic.streaming.places import Place

__all__ = ["Arrivals", "Arrived", "LookAhead", "SenderIds", "noted_arrivals"]

# More at once would only take more memory.
_TOGETHER = 256


@dataclass(frozen=True, eq=False)
class Arrivals:
    """Samples that are there together, as many labels and names, None for what was not given."""

    xs: Sequence[Any]
    ys: Sequence[Any]
    names: Sequence[str | None]

    @classmethod
    def checked(cls, xs: Any, ys: Any, names: Sequence[str | None] | None) -> Arrivals:
        """Return them; StreamError if there are not as many of each."""
        samples, labels = checked_batch(xs, ys)
        called = [None] * len(samples) if names is None else list(names)
        if len(called) != len(samples):
            raise StreamError(f"{len(samples)} samples and {len(called)} names: give as many")
        return cls(samples, labels, called)


@dataclass(frozen=True, eq=False)
class Arrived:
    """What came of one sample.

    Parameters
    ----------
    seen : Observation
        What is said of it.
    number : int
        Which it is; 0 if it was refused.
    x, label, name
        As it was taken in; None for one that was known already.
    """

    seen: Observation
    number: int = 0
    x: NDArray[Any] | None = None
    label: int | None = None
    name: str | None = None

    def unkept(self) -> Arrived:
        """Return it as one that would not be known after a kill."""
        return replace(self, seen=replace(self.seen, sample_id=None))


def noted_arrivals(
    seen: Sequence[Arrived], place: Place | None
) -> tuple[dict[str, Any], NDArray[Any] | None]:
    """Return what is to be written down of samples, and the samples; nothing where nothing has changed."""
    taken = [each for each in seen if each.x is not None]
    refused = [each.seen.refused for each in seen if each.seen.refused]
    facts: dict[str, Any] = {"refused": refused} if refused else {}
    if taken:
        facts |= {
            "number": taken[0].number,
            "y": [each.label for each in taken],
            "names": [each.name for each in taken],
        }
    if facts and place is not None:
        facts["place"] = [place.source, place.at]
    return facts, np.stack([each.x for each in taken if each.x is not None]) if taken else None


class SenderIds:
    """The newest names that senders gave their samples: one that is sent again is known.

    Parameters
    ----------
    most : int
        Names that are kept.
    known : mapping of str to int
        Of an earlier life, oldest first.

    Examples
    --------
    >>> names = SenderIds(most=2)
    >>> for number, name in enumerate(["door-1", "door-2", "door-3"], start=1):
    ...     names.add(name, number)
    >>> names.number("door-1"), names.number("door-3"), names.known
    (None, 3, {'door-2': 2, 'door-3': 3})
    """

    def __init__(self, most: int, known: Mapping[str, int] | None = None) -> None:
        self._most = most
        self._known = dict(known or {})

    def add(self, name: str, number: int) -> None:
        """Remember which sample a name stands for."""
        self._known[name] = number
        while len(self._known) > self._most:
            del self._known[next(iter(self._known))]

    def number(self, name: str) -> int | None:
        """Return which sample a name stands for; None if it is new, or forgotten."""
        return self._known.get(name)

    @property
    def known(self) -> dict[str, int]:
        """Every name that is remembered, oldest first."""
        return dict(self._known)


class LookAhead:
    """Looks at samples in their order; at those to come, too, as long as the model stays what it is.

    Parameters
    ----------
    classifier : Classifier
        It may learn labels between two looks.
    xs : sequence
        Samples as they came, unchecked.
    """

    def __init__(self, classifier: Classifier, xs: Sequence[Any]) -> None:
        self._classifier, self._xs = classifier, xs
        self._samples: dict[int, NDArray[Any]] = {}
        self._looks: dict[int, Look] = {}
        self._model: object = None
        # Samples before this place are looked at alone: together the model did not take them.
        self._alone = 0

    def sample(self, place: int) -> NDArray[Any]:
        """Return a sample, checked; raises Refused if it is none."""
        if place not in self._samples:
            self._samples[place] = checked_sample(self._xs[place], self._classifier.like)
        return self._samples[place]

    def look(self, place: int) -> Look:
        """Return what is kept of a sample, and its class scores; raises Refused if the model does not take it."""
        classifier = self._classifier
        if self._model != self._model_now():
            self._looks.clear()
        if place not in self._looks:
            if classifier.like is None or place < self._alone:
                return classifier.look(self.sample(place))
            self._look_together(place)
            self._model = self._model_now()
        return self._looks.pop(place) if place in self._looks else self.look(place)

    def _model_now(self) -> object:
        """Return what changes with the head's outputs and the frozen part."""
        return id(self._classifier.body), self._classifier.width

    def _look_together(self, place: int) -> None:
        end = min(place + _TOGETHER, len(self._xs))
        places = [each for each in range(place, end) if self._makes_sense(each)]
        try:
            kept, scores = self._classifier.looks(np.stack([self._samples[p] for p in places]))
        except Refused:
            self._alone = end
            return
        self._looks = {each: (kept[i], scores[i]) for i, each in enumerate(places)}

    def _makes_sense(self, place: int) -> bool:
        try:
            self.sample(place)
        except Refused:
            return False
        return True
