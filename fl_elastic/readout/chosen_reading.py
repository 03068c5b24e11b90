"""What a head reads within a bound of features: the best places, or their projection where the bound is small."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fl_elastic.errors import UpdateError
from fl_elastic.readout.choice import EXAMPLES, Choice, Sample, choose_places
from fl_elastic.readout.place import MOST_FEATURES, Reading, allowed_features
from fl_elastic.readout.projection import Directions

__all__ = ["ChosenReading", "candidate_features", "choose_reading"]

# Heads on places of fewer features are no better than one on all directions that the examples span.
_PROJECTED = 3 * EXAMPLES


@dataclass(frozen=True, eq=False)
class ChosenReading:
    """What a head reads.

    Attributes
    ----------
    reading : Reading
        The places, and how many directions their features are projected onto.
    directions : Directions or None
        These directions; None where the features themselves are read.
    choice : Choice or None
        What each place would have been worth; None where the places were given.
    """

    reading: Reading
    directions: Directions | None
    choice: Choice | None


def candidate_features(most: int) -> int:
    """Return how many features places may have from which at most ``most`` are read.

    Where few are affordable, places of any width are projected onto the directions that the choosing examples span,
    `EXAMPLES` at most: that is right more often than the places of few features are.

    >>> candidate_features(256), candidate_features(2048)
    (2560, 2048)
    """
    return MOST_FEATURES if most < _PROJECTED else most


def choose_reading(sample: Sample, *, most_features: int, read: str = "auto") -> ChosenReading:
    """Return what a head should read, chosen by the error on held-out examples.

    Parameters
    ----------
    sample : Sample
        Examples with features at every candidate, see `candidate_features`.
    most_features : int
        Bound of the numbers that are read of an example.
    read : str
        ``auto``, perhaps with a bound of its own as in ``auto>512``, or the name of a `Reading`, whose directions
        alone are then looked for.

    Raises
    ------
    UpdateError
        If not all of the places are in the sample, none has at most so many features, or targets do not vary.
    """
    choice, allowed = None, allowed_features(read)
    if allowed is not None:
        most_features = min(most_features, allowed)
        choice = choose_places(sample, most_features=candidate_features(most_features))
        width = min(most_features, EXAMPLES) if choice.best.features > most_features else 0
        reading = Reading(choice.best.places, width)
    else:
        reading = Reading.parse(read)
        missing = [str(place) for place in reading.places if place not in sample.rows]
        if missing:
            raise UpdateError(f"not all examples have features at {', '.join(missing)}")
    if not reading.width:
        return ChosenReading(reading, None, choice)
    rows = [sample.rows[place] for place in reading.places]
    directions = Directions.of(rows, sample.constant, reading.width)
    return ChosenReading(replace(reading, width=len(directions.matrix)), directions, choice)
