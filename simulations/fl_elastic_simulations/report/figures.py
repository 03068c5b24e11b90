"""The line plots and the bars as plain values that plotly.js draws; no plotly needed to make them.

The page's script adds what depends on the reader: colours of text and grid, and the hidden methods.
``legendgroup`` holds the position of the method that a trace belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean

from fl_elastic_simulations.report.formats import (
    TIMES,
    Unit,
    accuracy_text,
    byte_unit,
    bytes_text,
    ratio_text,
    seconds_text,
    time_unit,
)
from fl_elastic_simulations.report.palette import Ink, ink
from fl_elastic_simulations.report.summary import Method, Point, Results

__all__ = [
    "Curve",
    "Figure",
    "accuracy_by_time",
    "accuracy_by_uplink",
    "drawn_text",
    "mean_curve",
    "speed_bars",
]

Json = Mapping[str, object]
_FEW_POINTS = 12
_SLOTS = 0.84  # of the room of one device class, so that the classes stand apart


@dataclass(frozen=True)
class Figure:
    """What plotly.js draws, and the height in pixels that it needs."""

    traces: tuple[Json, ...]
    layout: Json
    height: int


def drawn_text(text: str) -> str:
    """Escape a text for plotly.js, which reads a small part of HTML in names, ticks and titles."""
    return escape(text, quote=False)


def accuracy_by_time(results: Results) -> Figure | None:
    """Return accuracy against time, or nothing where no history holds both."""
    title = "simulated time" if results.simulated else "time"
    return _accuracy(results, title, lambda curve: curve.seconds, time_unit, seconds_text)


def accuracy_by_uplink(results: Results) -> Figure | None:
    """Return accuracy against the bytes sent up, or nothing where no history holds both."""
    return _accuracy(results, "uplink", lambda curve: curve.uplink_bytes, byte_unit, bytes_text)


def _accuracy(
    results: Results,
    title: str,
    spent: Callable[[Curve], tuple[float, ...]],
    unit_for: Callable[[float], Unit],
    written: Callable[[float], str],
) -> Figure | None:
    curves = [mean_curve(method.history) for method in results.methods]
    largest = max((max(spent(curve)) for curve in curves if spent(curve)), default=None)
    if largest is None:
        return None
    unit = unit_for(largest)
    bands: list[Json] = []
    lines: list[Json] = []
    for position, (method, curve) in enumerate(zip(results.methods, curves, strict=True)):
        values = spent(curve)
        if not values:
            continue
        scaled = [value / unit.size for value in values]
        if curve.seeds > 1:
            bands.append(_band(scaled, curve, position))
        lines.append(_line(method, scaled, curve, [written(value) for value in values], position))
    return Figure(
        # All bands lie below all lines.
        traces=(*bands, *lines),
        layout={
            "xaxis": _axis(f"{title} ({unit.name})", rangemode="tozero"),
            "yaxis": _axis("accuracy", tickformat=".1~%"),
            "hovermode": "closest",
            **_target(results.target_accuracy),
        },
        height=380,
    )


def _line(
    method: Method, across: Sequence[float], curve: Curve, spent: Sequence[str], position: int
) -> Json:
    style = ink(position)
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(across) <= _FEW_POINTS else "lines",
        "name": drawn_text(method.name),
        "legendgroup": str(position),
        "x": list(across),
        "y": list(curve.accuracy),
        "customdata": [
            [drawn_text(method.name), index, text]
            for index, text in zip(curve.rounds, spent, strict=True)
        ],
        "line": {"color": style.colour, "dash": style.dash, "width": 2.5},
        "marker": {"color": style.colour, "size": 6},
        "hovertemplate": "<b>%{customdata[0]}</b><br>%{y:.1%} after round %{customdata[1]}"
        "<br>%{customdata[2]}<extra></extra>",
    }


def _band(across: Sequence[float], curve: Curve, position: int) -> Json:
    """Return the area between the lowest and the highest seed as one closed outline."""
    return {
        "type": "scatter",
        "mode": "lines",
        "legendgroup": str(position),
        "x": [*across, *reversed(across)],
        "y": [*curve.lowest, *reversed(curve.highest)],
        "fill": "toself",
        "fillcolor": ink(position).faint(0.2),
        "line": {"width": 0},
        "hoverinfo": "skip",
    }


def _target(accuracy: float | None) -> Json:
    """Return a dotted line at the target, named on the left, where the curves are still low."""
    if accuracy is None:
        return {}
    return {
        "shapes": [
            {
                "type": "line",
                "xref": "paper",
                "x0": 0,
                "x1": 1,
                "y0": accuracy,
                "y1": accuracy,
                "line": {"dash": "dot", "width": 1.5},
            }
        ],
        "annotations": [
            {
                "text": f"target {accuracy_text(accuracy)}",
                "xref": "paper",
                "x": 0,
                "xanchor": "left",
                "y": accuracy,
                "yanchor": "bottom",
                "showarrow": False,
            }
        ],
    }


def speed_bars(results: Results) -> Figure | None:
    """Return the step speed-up asked and achieved, by device class; nothing where none is known.

    The bars lie, so that long device names fit a phone. Each requested bar is a frame around the
    bar achieved, so that falling short is seen at once.
    """
    if not any(method.speeds for method in results.methods):
        return None
    classes, methods = len(results.devices), len(results.methods)
    slot = _SLOTS / methods
    traces: list[Json] = []
    for position, method in enumerate(results.methods):
        shift = (position - (methods - 1) / 2) * slot
        traces += _frame_and_bar(results, method, position, shift, slot)
    return Figure(
        traces=tuple(traces),
        layout={
            "barmode": "overlay",
            "xaxis": _axis("speed-up over full steps", rangemode="tozero", ticksuffix=TIMES),
            "yaxis": _axis(
                "",
                tickvals=list(range(classes)),
                ticktext=[_two_lines(device.label) for device in results.devices],
                range=[classes - 0.5, -0.5],
                showgrid=False,
                zeroline=False,
            ),
            "hovermode": "closest",
        },
        height=90 + classes * max(40, 18 * methods + 8),
    )


def _frame_and_bar(
    results: Results, method: Method, position: int, shift: float, slot: float
) -> tuple[Json, Json]:
    style = ink(position)
    rows = [
        (index + shift, method.speeds[device.name])
        for index, device in enumerate(results.devices)
        if device.name in method.speeds
    ]
    shared: Json = {
        "type": "bar",
        "orientation": "h",
        "name": drawn_text(method.name),
        "legendgroup": str(position),
        "y": [place for place, _ in rows],
        "customdata": [
            [drawn_text(method.name), ratio_text(speed.requested), ratio_text(speed.achieved)]
            for _, speed in rows
        ],
        "hovertemplate": "<b>%{customdata[0]}</b><br>asked %{customdata[1]}"
        "<br>achieved %{customdata[2]}<extra></extra>",
    }
    frame = {
        **shared,
        "x": [speed.requested for _, speed in rows],
        "width": 0.82 * slot,
        "marker": _frame_style(style),
    }
    bar = {
        **shared,
        "x": [speed.achieved for _, speed in rows],
        "width": 0.42 * slot,
        "marker": {
            "color": style.colour,
            "line": {"width": 0},
            "pattern": {"shape": "" if style.dash == "solid" else "/"},
        },
    }
    return frame, bar


def _frame_style(style: Ink) -> Json:
    return {"color": style.faint(0.12), "line": {"color": style.colour, "width": 1.5}}


def _two_lines(label: str, width: int = 12) -> str:
    """Break a long label at the space that is nearest to its middle."""
    spaces = [index for index, letter in enumerate(label) if letter == " "]
    if len(label) <= width or not spaces:
        return drawn_text(label)
    middle = min(spaces, key=lambda index: abs(index - len(label) / 2))
    return f"{drawn_text(label[:middle])}<br>{drawn_text(label[middle + 1 :])}"


def _axis(title: str, **more: object) -> Json:
    return {"title": {"text": title}, "automargin": True, **more}


@dataclass(frozen=True)
class Curve:
    """One value per round in each tuple; ``seconds`` or ``uplink_bytes`` may be empty.

    ``lowest`` and ``highest`` are those of any single seed.
    """

    rounds: tuple[int, ...]
    accuracy: tuple[float, ...]
    lowest: tuple[float, ...]
    highest: tuple[float, ...]
    seconds: tuple[float, ...]
    uplink_bytes: tuple[float, ...]
    seeds: int


def mean_curve(history: Sequence[Point]) -> Curve:
    """Average a history over its seeds, round by round.

    Only the rounds that every seed has evaluated count: where a seed is missing, the mean of the
    others would jump, in accuracy and on the time axis.

    >>> first = [Point(0, 1, 0.4, 10.0, 5.0), Point(0, 2, 0.9, 20.0, 9.0)]
    >>> curve = mean_curve([*first, Point(1, 1, 0.6, 14.0, 5.0)])
    >>> curve.rounds, curve.accuracy, curve.lowest, curve.highest, curve.seconds
    ((1,), (0.5,), (0.4,), (0.6,), (12.0,))
    """
    by_seed: dict[int, dict[int, Point]] = {}
    for point in history:
        by_seed.setdefault(point.seed, {})[point.round] = point
    shared = sorted(
        set.intersection(*(set(points) for points in by_seed.values())) if by_seed else ()
    )
    columns = [[points[index] for points in by_seed.values()] for index in shared]
    accuracies = [[point.accuracy for point in column] for column in columns]
    return Curve(
        rounds=tuple(shared),
        accuracy=tuple(fmean(values) for values in accuracies),
        lowest=tuple(min(values) for values in accuracies),
        highest=tuple(max(values) for values in accuracies),
        seconds=_means([[point.seconds for point in column] for column in columns]),
        uplink_bytes=_means([[point.uplink_bytes for point in column] for column in columns]),
        seeds=len(by_seed),
    )


def _means(columns: Sequence[Sequence[float | None]]) -> tuple[float, ...]:
    """Return the mean of each column, or nothing at all if one value is unknown."""
    means = []
    for column in columns:
        known = [value for value in column if value is not None]
        if len(known) < len(column):
            return ()
        means.append(fmean(known))
    return tuple(means)
