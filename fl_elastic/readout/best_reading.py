"""Choose what a head reads within a bound on features: the best places, or a projection if the bound is small."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fl_elastic.errors import UpdateError
from fl_elastic.readout.best_places import EXAMPLES, Choice, Sample, choose_places
from fl_elastic.readout.place import MOST_FEATURES, Reading
from fl_elastic.readout.projection import Directions

# Below this many features, places are no better than a projection onto all directions that the examples span.
_PROJECTED = 3 * EXAMPLES


@dataclass(frozen=True, eq=False)
class ChosenReading:
    """The chosen reading of a head: places, and a projection if there is one.

    Attributes
    ----------
    reading : Reading
        The places, and the number of directions that their features are projected onto.
    directions : Directions or None
        The directions; None if the features themselves are read.
    choice : Choice or None
        The error at each place; None if the places were given.
    """

    reading: Reading
    directions: Directions | None
    choice: Choice | None


def candidate_features(most: int) -> int:
    """Return the bound on features of candidate places, if at most ``most`` numbers may be read.

    With a small bound, places with more features are projected onto the directions that the sample's examples span
    (at most `EXAMPLES` directions): such a head is more accurate than one that reads a place of few features.

    >>> candidate_features(256), candidate_features(2048)
    (2048, 2048)
    """
    return MOST_FEATURES if most < _PROJECTED else most


def choose_reading(sample: Sample, asked: Reading, *, most_features: int) -> ChosenReading:
    """Return the reading with the least error on held-out examples.

    Parameters
    ----------
    sample : Sample
        Examples with features at every candidate, see `candidate_features`.
    asked : Reading
        The reading that is asked for. With places, only the directions are computed; without, all places are
        compared.
    most_features : int
        Bound on the numbers that are read per example.

    Raises
    ------
    UpdateError
        If a place is not in the sample, every place has too many features, or targets do not vary.
    """
    choice, reading = None, asked
    if not asked.places:
        most_features = min(most_features, asked.width or most_features)
        choice = choose_places(sample, most_features=candidate_features(most_features))
        width = min(most_features, EXAMPLES) if choice.best.features > most_features else 0
        reading = replace(asked, places=choice.best.places, width=width)
    else:
        missing = [str(place) for place in reading.places if place not in sample.rows]
        if missing:
            raise UpdateError(f"not all examples have features at {', '.join(missing)}")
    if not reading.width:
        return ChosenReading(reading, None, choice)
    rows = [sample.rows[place] for place in reading.places]
    directions = Directions.of(rows, sample.constant, reading.width)
    return ChosenReading(replace(reading, width=len(directions.matrix)), directions, choice)
