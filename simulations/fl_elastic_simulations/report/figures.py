"""The figures of a simulation: accuracy against time and uplink, coverage, speed by device class.

``legendgroup`` holds the position of the method that a trace belongs to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from fl_elastic_simulations.report.document import Figure, drawn_text, figure
from fl_elastic_simulations.report.formats import (
    TIMES,
    Unit,
    abbreviated,
    accuracy_text,
    byte_unit,
    bytes_text,
    ratio_text,
    seconds_text,
    time_unit,
)
from fl_elastic_simulations.report.palette import EMPTY, ink
from fl_elastic_simulations.report.summary import DeviceClass, Method, Point, Results, Shares

__all__ = [
    "Curve",
    "accuracy_by_round",
    "accuracy_by_time",
    "accuracy_by_traffic",
    "accuracy_by_uplink",
    "coverage_map",
    "mean_curve",
    "row_names",
    "shown_range",
    "speed_bars",
]

Json = Mapping[str, object]
_FEW_POINTS = 12
_EARLY = 5  # one in so many tests may lie below the figure
_CLOSE = 0.13  # of the height: texts that are less apart, one moved up and one down, would lie on each other
_ROOM_FOR_ENDS = {"l": 0, "r": 58, "t": 14, "b": 0}
_ROUNDS = Unit("round", 1.0)
_MANY_CELLS = 30
_MOST_TICKS = 16
_SLOTS = 0.84  # of the room of one device class, so that the classes stand apart


def accuracy_by_time(results: Results) -> Figure | None:
    """Return accuracy against time, or nothing where no history holds both."""
    title = "simulated time" if results.simulated else "time"
    return _accuracy(results, title, lambda curve: curve.seconds, time_unit, seconds_text)


def accuracy_by_round(results: Results) -> Figure | None:
    """Return accuracy against rounds, or nothing without a history."""
    return _accuracy(
        results, "", lambda curve: tuple(map(float, curve.rounds)), lambda _: _ROUNDS, _round_text
    )


def _round_text(number: float) -> str:
    return f"{number:.0f} rounds"


def accuracy_by_uplink(results: Results) -> Figure | None:
    """Return accuracy against the bytes sent up, or nothing where no history holds both."""
    return _accuracy(results, "uplink", lambda curve: curve.uplink_bytes, byte_unit, bytes_text)


def accuracy_by_traffic(results: Results) -> Figure | None:
    """Return accuracy against the bytes of both directions, or nothing where no history holds them."""
    return _accuracy(
        results, "bytes up and down", lambda curve: curve.traffic_bytes, byte_unit, bytes_text
    )


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
    ends: list[tuple[int, float, float, str]] = []
    shown = shown_range([c for c in curves if spent(c)], results.target_accuracy)
    for position, (method, curve) in enumerate(zip(results.methods, curves, strict=True)):
        values = spent(curve)
        if not values:
            continue
        scaled = [value / unit.size for value in values]
        if curve.seeds > 1:
            bands.append(_band(scaled, curve, position))
        # The figure of the table, which is a mean over the last tests.
        final = curve.accuracy[-1] if method.final_accuracy is None else method.final_accuracy
        ends.append((position, scaled[-1], curve.accuracy[-1], accuracy_text(final)))
        lines.append(_line(method, scaled, curve, [written(value) for value in values], position))
    return figure(
        # All bands lie below all lines.
        [*bands, *lines, *_ends(ends, _CLOSE * (shown[1] - shown[0] if shown else 1.0))],
        380,
        xaxis={
            "title": {"text": f"{title} ({unit.name})" if title else unit.name},
            "rangemode": "tozero",
        },
        margin=_ROOM_FOR_ENDS,
        yaxis={
            "title": {"text": "accuracy"},
            "tickformat": ".1~%",
            **({"range": shown} if shown else {}),
        },
        **_target(results.target_accuracy),
    )


def shown_range(curves: Sequence[Curve], target: float | None) -> list[float] | None:
    """Return the accuracies to draw, where curves spend most of their tests; None for all of them.

    A run that rises from a tenth to 95 % in its first rounds leaves no room for what its methods differ in.

    >>> rising = mean_curve([Point(0, n, a, 1.0, 1.0) for n, a in enumerate((0.1, 0.6, *[0.95, 0.97] * 4))])
    >>> [round(each, 3) for each in shown_range([rising], None) or ()]
    [0.947, 0.972]
    >>> shown_range([mean_curve([Point(0, n, n / 10, 1.0, 1.0) for n in range(9)])], None)
    """
    tested = sorted(accuracy for curve in curves for accuracy in curve.accuracy)
    if not tested:
        return None
    wanted = [tested[len(tested) // _EARLY], *(curve.accuracy[-1] for curve in curves)]
    low = min(wanted if target is None else [*wanted, target])
    high = max(max(curve.highest) for curve in curves)
    span = max(high - low, 0.01)
    if low - tested[0] < span:
        return None
    return [low - 0.15 * span, high + 0.1 * span]


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
        "customdata": list(zip(curve.rounds, spent, strict=True)),
        "line": {"color": style.colour, "dash": style.dash, "width": 2.5},
        "marker": {"color": style.colour, "size": 6},
        "hovertemplate": "<b>%{fullData.name}</b><br>%{y:.1%} after round %{customdata[0]}"
        "<br>%{customdata[1]}<extra></extra>",
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


def _ends(ends: Sequence[tuple[int, float, float, str]], close: float) -> list[Json]:
    """Return what each method ended at, written beside its line's end; those that end close together lie apart."""
    ordered = sorted(ends, key=lambda end: end[2])
    heights = [-math.inf, *(y for _, _, y, _ in ordered), math.inf]
    marks: list[Json] = []
    for (position, x, y, text), below, above in zip(ordered, heights, heights[2:], strict=False):
        # The lowest of those close together goes down, the highest up.
        down, up = above - y < close <= y - below, y - below < close <= above - y
        beside = "bottom right" if down else "top right" if up else "middle right"
        marks.append(
            {
                "type": "scatter",
                "mode": "markers+text",
                "legendgroup": str(position),
                "x": [x],
                "y": [y],
                "text": [text],
                "textposition": beside,
                "textfont": {"color": ink(position).colour},
                "marker": {"color": ink(position).colour, "size": 7},
                "cliponaxis": False,
                "hoverinfo": "skip",
            }
        )
    return marks


def _target(accuracy: float | None) -> dict[str, object]:
    """Return a dotted line at the target, named on the left, where the curves are still low."""
    if accuracy is None:
        return {}
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": accuracy, "y1": accuracy}
    name = {"text": f"target {accuracy_text(accuracy)}", "xref": "paper", "x": 0, "y": accuracy}
    return {
        "shapes": [{**line, "line": {"dash": "dot", "width": 1.5}}],
        "annotations": [{**name, "xanchor": "left", "yanchor": "bottom", "showarrow": False}],
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
    return figure(
        traces,
        90 + classes * max(40, 18 * methods + 8),
        barmode="overlay",
        xaxis={
            "title": {"text": "speed-up over full steps"}, "rangemode": "tozero", "ticksuffix": TIMES,
        },
        yaxis={
            "tickvals": list(range(classes)),
            "ticktext": [_two_lines(device.label) for device in results.devices],
            "range": [classes - 0.5, -0.5],
            "showgrid": False,
            "zeroline": False,
        },
    )  # fmt: skip


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
            [ratio_text(speed.requested), ratio_text(speed.achieved)] for _, speed in rows
        ],
        "hovertemplate": "<b>%{fullData.name}</b><br>asked %{customdata[0]}"
        "<br>achieved %{customdata[1]}<extra></extra>",
    }
    frame = {
        **shared,
        "x": [speed.requested for _, speed in rows],
        "width": 0.82 * slot,
        "marker": {"color": style.faint(0.12), "line": {"color": style.colour, "width": 1.5}},
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


def _two_lines(label: str, width: int = 12) -> str:
    """Break a long label at the space that is nearest to its middle."""
    spaces = [index for index, letter in enumerate(label) if letter == " "]
    if len(label) <= width or not spaces:
        return drawn_text(label)
    middle = min(spaces, key=lambda index: abs(index - len(label) / 2))
    return f"{drawn_text(label[:middle])}<br>{drawn_text(label[middle + 1 :])}"


def coverage_map(results: Results, device: DeviceClass, chosen: int) -> Figure:
    """Return what the clients of a device class trained: rounds across, groups down, a map per method.

    Only the map of the chosen method is shown.
    """
    groups, rounds = _extent(results)
    names = [*results.groups, *(f"group {index}" for index in range(len(results.groups), groups))]
    maps = [
        {
            "type": "heatmap",
            "legendgroup": str(position),
            "visible": position == chosen,
            "z": _transposed(shares, rounds, groups),
            "x0": 1,
            "dx": 1,
            "zmin": 0,
            "zmax": 1,
            "showscale": False,
            "colorscale": [[0, EMPTY], [1, ink(position).colour]],
            "xgap": 0 if rounds > _MANY_CELLS else 1,
            "ygap": 0 if groups > _MANY_CELLS else 1,
            "hoverongaps": False,
            "meta": [drawn_text(name) for name in names],
            "hovertemplate": "<b>%{text}</b><br>round %{x}<br>share %{z:.0%}<extra></extra>",
        }
        for position, method in enumerate(results.methods)
        if (shares := method.coverage.get(device.name))
    ]
    return figure(
        maps,
        min(max(72 + 16 * groups, 170), 420),
        xaxis={
            "title": {"text": "round"}, "range": [0.5, rounds + 0.5], "nticks": 6, "tickformat": "d",
            "showgrid": False, "zeroline": False,
        },
        yaxis=row_names(names),
    )  # fmt: skip


def row_names(names: Sequence[str]) -> dict[str, object]:
    """Return an axis of rows from above, with as many of their names as are still read."""
    ticks = range(0, len(names), -(-len(names) // _MOST_TICKS) or 1)
    return {
        "tickvals": list(ticks),
        "ticktext": [drawn_text(abbreviated(names[index])) for index in ticks],
        "range": [len(names) - 0.5, -0.5],
        "showgrid": False,
        "zeroline": False,
    }


def _transposed(shares: Shares, rounds: int, groups: int) -> list[list[float | None]]:
    """Turn rounds x groups into groups x rounds; what is not there is ``None``.

    >>> _transposed(((0.0, 1.0), (0.5,)), rounds=3, groups=2)
    [[0.0, 0.5, None], [1.0, None, None]]
    """
    return [[_share(shares, index, group) for index in range(rounds)] for group in range(groups)]


def _share(shares: Shares, index: int, group: int) -> float | None:
    if index >= len(shares) or group >= len(shares[index]):
        return None
    share = shares[index][group]
    # Three decimals: a colour cannot show more, and the page stays small.
    return None if share is None else round(share, 3)


def _extent(results: Results) -> tuple[int, int]:
    """Return the largest number of groups and of rounds of any coverage."""
    tables = [shares for method in results.methods for shares in method.coverage.values()]
    groups = max((len(row) for shares in tables for row in shares), default=0)
    return max(groups, len(results.groups)), max((len(shares) for shares in tables), default=0)


@dataclass(frozen=True)
class Curve:
    """One value per round in each tuple; ``seconds`` and bytes, up or in both directions, may be empty.

    ``lowest`` and ``highest`` are those of any single seed.
    """

    rounds: tuple[int, ...]
    accuracy: tuple[float, ...]
    lowest: tuple[float, ...]
    highest: tuple[float, ...]
    seconds: tuple[float, ...]
    uplink_bytes: tuple[float, ...]
    seeds: int
    traffic_bytes: tuple[float, ...] = ()


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
        traffic_bytes=_means([[_traffic(point) for point in column] for column in columns]),
    )


def _traffic(point: Point) -> float | None:
    up, down = point.uplink_bytes, point.downlink_bytes
    return None if up is None or down is None else up + down


def _means(columns: Sequence[Sequence[float | None]]) -> tuple[float, ...]:
    """Return the mean of each column, or nothing at all if one value is unknown."""
    means = []
    for column in columns:
        known = [value for value in column if value is not None]
        if len(known) < len(column):
            return ()
        means.append(fmean(known))
    return tuple(means)
