"""Small drawings in the page itself, without script: lines, stacked areas, and maps of cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from fl_elastic_simulations.report.formats import abbreviated
from fl_elastic_simulations.report.palette import COLOURS

__all__ = ["DRAWING_STYLE", "areas", "cells", "legend", "lines"]

DRAWING_STYLE = (
    ".drawing { width: 100%; height: auto; font-size: 11px; } .drawing text { fill: var(--muted); } "
    "tbody th { max-width: none; }"
)

_WIDTH, _HEIGHT = 640, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 10, 30
_ROW = 13

Series = Sequence[tuple[float, float]]


def lines(
    series: Mapping[str, Series], end: float, *, marks: Sequence[float] = (), label: str
) -> str:
    """Return a drawing of shares between 0 and 1 along a stream, a line each, with dashed marks.

    Parameters
    ----------
    series : mapping of str to sequence of (float, float)
        Position and share, by name.
    end : float
        Length of the stream.
    marks : sequence of float
        Positions, such as those of drifts.
    label : str
        What is drawn, for who cannot see it.
    """
    body = [_mark(mark / end) for mark in marks]
    for place, (name, points) in enumerate(series.items()):
        path = " ".join(f"{_x(at / end):.1f},{_y(share):.1f}" for at, share in points)
        body.append(
            f'<polyline points="{path}" fill="none" stroke="{_colour(place)}" stroke-width="2" '
            f'stroke-opacity="{_strength(place)}">'
            f"<title>{escape(name)}</title></polyline>"
        )
    ticks = [(share, f"{100 * share:.0f} %") for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    return _framed([*_axes(ticks, end), *body], label)


def areas(series: Mapping[str, Series], end: float, *, label: str) -> str:
    """Return a drawing of counts along a stream, one on top of the other."""
    positions = sorted({at for points in series.values() for at, _ in points})
    known = {name: dict(points) for name, points in series.items()}
    heights = [0.0] * len(positions)
    stacked: list[tuple[str, list[float], list[float]]] = []
    for name, counts in known.items():
        lower = heights
        heights = [h + counts.get(at, 0.0) for h, at in zip(lower, positions, strict=True)]
        stacked.append((name, lower, heights))
    top = max(heights, default=0.0) or 1.0
    body = []
    for place, (name, lower, upper) in enumerate(stacked):
        there, back = (
            [f"{_x(at / end):.1f},{_y(h / top):.1f}" for at, h in zip(positions, side, strict=True)]
            for side in (upper, lower)
        )
        body.append(
            f'<polygon points="{" ".join([*there, *reversed(back)])}" fill="{_colour(place)}" '
            f'fill-opacity="{_strength(place)}"><title>{escape(name)}</title></polygon>'
        )
    ticks = [(share, f"{top * share:.0f}") for share in (0.0, 0.5, 1.0)]
    return _framed([*_axes(ticks, end), *body], label)


def cells(
    names: Sequence[str], columns: Sequence[tuple[float, Sequence[int], bool]], end: float, *, label: str
) -> str:  # fmt: skip
    """Return a map: a row for each name, and at each position a cell for every row that is in use.

    Parameters
    ----------
    names : sequence of str
        Of the rows, from above.
    columns : sequence of (float, sequence of int, bool)
        Position, rows in use, and whether it is drawn pale.
    end, label
        As in `lines`.
    """
    height = _TOP + _ROW * len(names) + _BOTTOM
    width = max((_WIDTH - _LEFT - _RIGHT) / max(len(columns), 1) * 0.8, 1.0)
    left = _LEFT + 60
    scale = (_WIDTH - left - _RIGHT - width) / end
    body = [
        f'<text x="{left - 6}" y="{_TOP + _ROW * row + 10}" text-anchor="end">'
        f"<title>{escape(name)}</title>{escape(abbreviated(name))}</text>"
        for row, name in enumerate(names)
    ]
    for at, rows, pale in columns:
        body += [
            f'<rect x="{left + scale * at:.1f}" y="{_TOP + _ROW * row + 1}" width="{width:.1f}" '
            f'height="{_ROW - 2}" fill="{COLOURS[0] if pale else COLOURS[1]}"/>'
            for row in rows
        ]
    body += [
        f'<text x="{left + scale * share * end:.1f}" y="{height - 12}" text-anchor="middle">'
        f"{share * end:.0f}</text>"
        for share in (0.0, 0.5, 1.0)
    ]
    return _framed(body, label, height)


def legend(names: Sequence[str]) -> str:
    """Return the names with their colours in `lines` and `areas`."""
    dots = (
        f'<span class="dot" style="--method:{_colour(place)};opacity:{_strength(place)}"></span>'
        f"{escape(name)} &nbsp; "
        for place, name in enumerate(names)
    )
    return f'<p class="guide">{"".join(dots)}</p>'


def _framed(body: Sequence[str], label: str, height: float = _HEIGHT) -> str:
    head = f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" class="drawing" aria-label="{escape(label)}">'
    return "\n".join([head, *body, "</svg>"])


def _axes(ticks: Sequence[tuple[float, str]], end: float) -> list[str]:
    drawn = [
        f'<line x1="{_x(0):.1f}" x2="{_x(1):.1f}" y1="{_y(share):.1f}" y2="{_y(share):.1f}" '
        'stroke="var(--line)" stroke-width="0.5"/>'
        f'<text x="{_LEFT - 6}" y="{_y(share) + 4:.1f}" text-anchor="end">{text}</text>'
        for share, text in ticks
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        anchor = "end" if share == 1 else "middle"
        drawn.append(
            f'<text x="{_x(share):.1f}" y="{_HEIGHT - 12}" text-anchor="{anchor}">{share * end:.0f}</text>'
        )
    return drawn


def _mark(share: float) -> str:
    return (
        f'<line x1="{_x(share):.1f}" x2="{_x(share):.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" '
        'stroke="var(--muted)" stroke-dasharray="3 3" class="mark"/>'
    )


def _colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def _strength(place: int) -> float:
    """Return an opacity: paler where the colours come again."""
    return (1.0, 0.55, 0.3)[place // len(COLOURS) % 3]


def _x(share: float) -> float:
    return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)


def _y(share: float) -> float:
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP)
