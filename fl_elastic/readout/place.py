"""Names of the places that a head reads: a tensor in a model, or the model's input, and its pooling to features."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from fl_elastic.errors import PlanError

INPUT = "input"
"""Name of the model's own input in a place."""

MOST_FEATURES = 2048
"""Default bound on features: the cost of solving for a head grows with their square."""

BODY, HEAD = "body", "head"
"""Names of the submodules of a readout: the model and the linear layer."""

_AUTO, _MIRRORED = "auto", "mirrored:"
_AT_INPUT, _JOIN, _WIDTH = "in:", "+", ">"
_MOST_WIDTH = 10**6
_POOLING = re.compile(r"([a-z][a-z_]*?)([0-9]{0,6})")


@dataclass(frozen=True, order=True)
class Place:
    """A tensor inside a model, and how it becomes a row of features.

    Attributes
    ----------
    module : str
        The module whose output is read, or `INPUT` for the model's own input.
    pooling : str
        Registered name of the pooling, such as ``grid``.
    size : int
        Size of the pooling, such as 4 for a grid of 4 x 4; 0 if it has none.
    at_input : bool
        Whether the module's input is read instead of its output.

    Examples
    --------
    >>> place = Place.parse("features.6@grid4")
    >>> place.module, place.pooling, place.size, str(place)
    ('features.6', 'grid', 4, 'features.6@grid4')
    >>> str(Place("classifier.1", "flat", at_input=True))
    'in:classifier.1@flat'
    """

    module: str
    pooling: str
    size: int = 0
    at_input: bool = False

    @classmethod
    def parse(cls, text: str) -> Place:
        """Return the place of this name; raise PlanError if it does not have the form MODULE@POOLING."""
        module, at, pooling = text.strip().rpartition("@")
        found = _POOLING.fullmatch(pooling)
        at_input = module.startswith(_AT_INPUT)
        module = module.removeprefix(_AT_INPUT)
        if not at or not module or _JOIN in module or found is None:
            raise PlanError(
                f"place {text!r} is not of the form MODULE@POOLING: use for example features.6@grid4, "
                f"{INPUT}@flat, or several joined by +"
            )
        return cls(module, found[1], int(found[2] or 0), at_input)

    def __str__(self) -> str:
        size = str(self.size) if self.size else ""
        return f"{_AT_INPUT if self.at_input else ''}{self.module}@{self.pooling}{size}"


def parse_places(text: str) -> tuple[Place, ...]:
    """Return the places of a name such as ``features.3@grid8+features.6@grid8``, each once.

    Raises
    ------
    PlanError
        If a part is not the name of a place, or occurs twice.

    Examples
    --------
    >>> [str(place) for place in parse_places("input@flat+features.6@grid2")]
    ['input@flat', 'features.6@grid2']
    """
    places = tuple(Place.parse(part) for part in text.split(_JOIN))
    if len(set(places)) < len(places):
        raise PlanError(f"places {text!r} name one of them twice: give each once")
    return places


@dataclass(frozen=True)
class Reading:
    """The reading of a head: features of places side by side, optionally projected onto fewer directions.

    Attributes
    ----------
    places : tuple of Place
        The places whose features are read; empty if they are to be chosen.
    width : int
        Number of directions that they are projected onto, 0 to read the features themselves. If places are to be
        chosen, the bound on features.
    mirrored : bool
        Whether features are the means over each image and its mirror image.

    Examples
    --------
    >>> reading = Reading.parse("features.3@grid4+features.6@grid8>256")
    >>> len(reading.places), reading.width, str(reading)
    (2, 256, 'features.3@grid4+features.6@grid8>256')
    >>> Reading.parse("mirrored:auto>512")
    Reading(places=(), width=512, mirrored=True)
    """

    places: tuple[Place, ...] = ()
    width: int = 0
    mirrored: bool = False

    @classmethod
    def parse(cls, text: str) -> Reading:
        """Return the reading with this name; raise PlanError if the name is invalid."""
        places, given, width = text.removeprefix(_MIRRORED).rpartition(_WIDTH)
        if not given or "@" in width:
            # The name of a module may contain the sign for the width.
            places, given, width = text.removeprefix(_MIRRORED), "", ""
        if given and not (width.isdecimal() and 0 < int(width) < _MOST_WIDTH):
            raise PlanError(
                f"{text!r} has no number of features after >: use for example {_AUTO}>512 or features.6@grid8>256"
            )
        chosen = () if places == _AUTO else parse_places(places)
        return cls(chosen, int(width or 0), text.startswith(_MIRRORED))

    def is_at(self, layer: str) -> bool:
        """Return whether this is the unchanged input of the module named ``layer``, so that no readout is needed.

        >>> Reading.parse("in:fc@flat").is_at("fc"), Reading.parse("mirrored:in:fc@flat").is_at("fc")
        (True, False)
        """
        at = [(place.module, place.at_input) for place in self.places]
        return at == [(layer, True)] and not self.width and not self.mirrored

    def __str__(self) -> str:
        width = f"{_WIDTH}{self.width}" if self.width else ""
        return f"{_MIRRORED if self.mirrored else ''}{joined(self.places) or _AUTO}{width}"


AUTO = Reading()
"""The reading whose places are still to be chosen."""


def joined(places: Iterable[Place]) -> str:
    """Return the name of several places that are read side by side."""
    return _JOIN.join(map(str, places))
