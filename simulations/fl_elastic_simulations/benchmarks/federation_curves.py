"""Accuracy against simulated time as a drawing in the page itself: no script, no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

from fl_elastic_simulations.benchmarks.federation_summary import Curve
from fl_elastic_simulations.report.palette import COLOURS

__all__ = ["chart"]

_WIDTH, _HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 10, 34
_GRID = 120
_FAINT = "var(--line)"


def chart(curves: Mapping[str, Sequence[Curve]], highlighted: Sequence[str]) -> str:
    """Return an SVG with one line per method, the mean of its seeds.

    Parameters
    ----------
    curves : mapping of str to list of curves
        By method, a curve per seed: simulated seconds, bytes up and down, and accuracy of each test.
    highlighted : sequence of str
        Methods that are drawn in colour, the first in grey; all others are faint.
    """
    end = max(curve[-1][0] for seeds in curves.values() for curve in seeds)
    grid = np.linspace(0.0, end, _GRID)
    lines = {name: _mean(seeds, grid) for name, seeds in curves.items()}
    top = max(float(line.max()) for line in lines.values())
    shown = [name for name in highlighted if name in lines]
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" class="drawing" '
        'aria-label="accuracy against simulated time">',
        *_axes(end, top),
        *(_path(lines[name], top, _FAINT, 1.2, name) for name in lines if name not in shown),
        *(
            _path(lines[name], top, COLOURS[index % len(COLOURS)], 2.4, name)
            for index, name in enumerate(shown)
        ),
        "</svg>",
        '<p class="guide">',
        *(
            f'<span class="dot" style="--method:{COLOURS[index % len(COLOURS)]}"></span>'
            f"{escape(name)} &nbsp; "
            for index, name in enumerate(shown)
        ),
        "others are faint</p>",
    ]
    return "\n".join(parts)


def _mean(seeds: Sequence[Curve], grid: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean accuracy over seeds at each time."""
    rows = [
        np.interp(grid, [row[0] for row in curve], [row[-1] for row in curve]) for curve in seeds
    ]
    return np.asarray(np.mean(rows, axis=0))


def _x(share: float) -> float:
    return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)


def _y(share: float) -> float:
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP)


def _path(line: NDArray[np.float64], top: float, colour: str, width: float, name: str) -> str:
    points = " ".join(
        f"{_x(index / (len(line) - 1)):.1f},{_y(float(value) / top):.1f}"
        for index, value in enumerate(line)
    )
    return (
        f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}">'
        f"<title>{escape(name)}</title></polyline>"
    )


def _axes(end: float, top: float) -> list[str]:
    marks = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        marks.append(
            f'<line x1="{_x(0):.1f}" x2="{_x(1):.1f}" y1="{_y(share):.1f}" y2="{_y(share):.1f}" '
            'stroke="var(--line)" stroke-width="0.5"/>'
            f'<text x="{_LEFT - 6}" y="{_y(share) + 4:.1f}" text-anchor="end">'
            f"{100 * share * top:.0f} %</text>"
            f'<text x="{_x(share):.1f}" y="{_HEIGHT - 14}" '
            f'text-anchor="{"end" if share == 1 else "middle"}">'
            f"{share * end:.3g} s</text>"
        )
    return marks
