"""What a model says of samples that come together, in one forward pass where that says the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.streaming.body import Look
from fl_elastic.streaming.classifier import Classifier
from fl_elastic.streaming.intake import Refused, checked_sample

__all__ = ["LookAhead"]

# More at once would only take more memory.
_TOGETHER = 256


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
