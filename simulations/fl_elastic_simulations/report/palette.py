"""One fixed colour per method, distinguishable for colour-blind readers on a light and a dark background."""

from __future__ import annotations

from dataclasses import dataclass

COLOURS = ("#8592a0", "#2478c8", "#d9730f", "#9430f0", "#cc0066", "#9f6e3c")
"""Grey for the reference, then hues that dichromats can also distinguish.

Found by search: each has a contrast of at least 3:1 with both backgrounds of the page (WCAG 2.1,
criterion 1.4.11), and any two are at least 20 apart in CIE Lab as seen with protanopia,
deuteranopia or tritanopia (Machado, Oliveira, Fernandes 2009).
"""

EMPTY = "rgba(133,146,160,0.15)"
"""Colour of empty cells of a map; a light or a dark background shows through."""

_DASHES = ("solid", "dash", "dashdot")


@dataclass(frozen=True)
class Ink:
    """Drawing style of one method, the same everywhere on the page."""

    colour: str
    dash: str

    def faint(self, opacity: float) -> str:
        """Return the colour as ``rgba(...)`` with this opacity.

        >>> Ink("#ff8000", "solid").faint(0.5)
        'rgba(255,128,0,0.5)'
        """
        red, green, blue = (int(self.colour[start : start + 2], 16) for start in (1, 3, 5))
        return f"rgba({red},{green},{blue},{opacity:g})"


def ink(position: int) -> Ink:
    """Return the style of the method at this position.

    When all colours are used, they repeat with dashed lines and hatched bars.

    >>> ink(0).dash, ink(len(COLOURS)) == Ink(COLOURS[0], "dash")
    ('solid', True)
    """
    again, index = divmod(position, len(COLOURS))
    return Ink(COLOURS[index], _DASHES[again % len(_DASHES)])
