"""The figures of a simulation: accuracy by time, rounds and uplink; coverage; speed; classes by client.

``legendgroup`` is the position of the method to which a trace belongs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from fl_elastic_simulations.report.document import Figure, drawn_text, figure, row_ticks
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
from fl_elastic_simulations.report.palette import EMPTY, ink
from fl_elastic_simulations.report.summary import DeviceClass, Method, Point, Results

Json = Mapping[str, object]
_FEW_POINTS = 12
_EARLY = 5  # one in so many tests may lie below the figure
_MANY_CELLS = 30
_SLOTS = 0.84  # of the room of one device class, so that the classes stand apart


def accuracy_by_time(results: Results) -> Figure | None:
    """Return accuracy against time; None if no history has both."""
    return _accuracy(results, "simulated_seconds")


def accuracy_by_round(results: Results) -> Figure | None:
    """Return accuracy against rounds; None without a history."""
    return _accuracy(results, "round")


def accuracy_by_uplink(results: Results) -> Figure | None:
    """Return accuracy against the bytes sent up; None if no history has both."""
    return _accuracy(results, "uplink_bytes")


def mean_curve(history: Sequence[Point]) -> pd.DataFrame:
    """Average a history over its seeds, test by test; ``lowest`` and ``highest`` are extremes of single seeds.

    Tests belong together by their round; if they come at equal intervals of time, whose models have a ``since``, by
    their time. Only tests that every seed has are used: if a seed were missing, the mean of the others would jump.
    A column with an unknown value is left out.

    >>> first = [Point(seed=0, round=r, accuracy=a, simulated_seconds=10.0 * r) for r, a in ((1, 0.4), (2, 0.9))]
    >>> curve = mean_curve([*first, Point(seed=1, round=1, accuracy=0.6, simulated_seconds=14.0)])
    >>> curve[["round", "accuracy", "lowest", "highest", "simulated_seconds"]].values.tolist()
    [[1.0, 0.5, 0.4, 0.6, 12.0]]
    """
    points = pd.DataFrame([point.model_dump() for point in history])
    if points.empty:
        return points
    by = "simulated_seconds" if points["since"].notna().all() else "round"
    together = points.groupby(by)
    columns = [
        each for each in ("accuracy", "round", "simulated_seconds", "uplink_bytes") if each != by
    ]
    means = together[columns].mean().where(together[columns].count().eq(together.size(), axis=0))
    means["lowest"], means["highest"] = together["accuracy"].min(), together["accuracy"].max()
    shared = means[together["seed"].nunique() == points["seed"].nunique()]
    return shared.reset_index().dropna(axis="columns")


def _accuracy(results: Results, across: str) -> Figure | None:
    """Return mean accuracy over seeds against a column of the history, with a band between the extremes."""
    curves = {i: mean_curve(method.history) for i, method in enumerate(results.methods)}
    curves = {i: curve for i, curve in curves.items() if across in curve and len(curve)}
    if not curves:
        return None
    largest = max(float(curve[across].max()) for curve in curves.values())
    unit = {
        "simulated_seconds": time_unit(largest), "uplink_bytes": byte_unit(largest), "round": Unit("round", 1.0),
    }[across]  # fmt: skip
    what = {"simulated_seconds": results.clock, "uplink_bytes": "uplink"}.get(across, "")
    bands = [
        _band(curve, curve[across] / unit.size, position)
        for position, curve in curves.items()
        if not curve["lowest"].equals(curve["highest"])
    ]
    lines = [
        _line(results.methods[position], curve, across, unit, position)
        for position, curve in curves.items()
    ]
    shown = _shown_range(list(curves.values()), results.target_accuracy)
    return figure(
        # Bands first, so that all of them are drawn below all lines.
        [*bands, *lines],
        380,
        xaxis={
            "title": {"text": f"{what} ({unit.name})" if what else unit.name},
            "rangemode": "tozero",
        },
        yaxis={
            "title": {"text": "accuracy"},
            "tickformat": ".1~%",
            **({"range": shown} if shown else {}),
        },
        **_target(results.target_accuracy),
    )


def _shown_range(curves: Sequence[pd.DataFrame], target: float | None) -> list[float] | None:
    """Return the range of accuracies to draw, in which most tests lie; None to draw all.

    A curve that rises from a tenth to 95 % in its first rounds would leave no room for the differences between
    methods.
    """
    tested = sorted(accuracy for curve in curves for accuracy in curve["accuracy"])
    wanted = [
        tested[len(tested) // _EARLY],
        *(float(curve["accuracy"].iloc[-1]) for curve in curves),
    ]
    low = min(wanted if target is None else [*wanted, target])
    high = max(float(curve["highest"].max()) for curve in curves)
    span = max(high - low, 0.01)
    return None if low - tested[0] < span else [low - 0.15 * span, high + 0.1 * span]


def _line(method: Method, curve: pd.DataFrame, across: str, unit: Unit, position: int) -> Json:
    style = ink(position)
    written = {"simulated_seconds": seconds_text, "uplink_bytes": bytes_text}.get(
        across, "{:.0f} rounds".format
    )
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(curve) <= _FEW_POINTS else "lines",
        "name": drawn_text(method.name),
        "legendgroup": str(position),
        "x": (curve[across] / unit.size).tolist(),
        "y": curve["accuracy"].tolist(),
        "customdata": [
            [int(r), written(value)] for r, value in zip(curve["round"], curve[across], strict=True)
        ],
        "line": {"color": style.colour, "dash": style.dash, "width": 2.5},
        "marker": {"color": style.colour, "size": 6},
        "hovertemplate": "<b>%{fullData.name}</b><br>%{y:.1%} after round %{customdata[0]}"
        "<br>%{customdata[1]}<extra></extra>",
    }


def _band(curve: pd.DataFrame, across: pd.Series[float], position: int) -> Json:
    """Return the area between the lowest and the highest seed as a closed outline."""
    return {
        "type": "scatter",
        "mode": "lines",
        "legendgroup": str(position),
        "x": [*across, *across[::-1]],
        "y": [*curve["lowest"], *curve["highest"][::-1]],
        "fill": "toself",
        "fillcolor": ink(position).faint(0.2),
        "line": {"width": 0},
        "hoverinfo": "skip",
    }


def _target(accuracy: float | None) -> dict[str, object]:
    """Return a dotted line at the target, labelled on the left, where the curves are still low."""
    if accuracy is None:
        return {}
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": accuracy, "y1": accuracy}
    name = {"text": f"target {accuracy_text(accuracy)}", "xref": "paper", "x": 0, "y": accuracy}
    return {
        "shapes": [{**line, "line": {"dash": "dot", "width": 1.5}}],
        "annotations": [{**name, "xanchor": "left", "yanchor": "bottom", "showarrow": False}],
    }


def speed_bars(results: Results) -> Figure | None:
    """Return requested and achieved step speed-ups by device class; None if none is known.

    The bars are horizontal, so that long device names fit on a phone. Each requested bar is a frame around the
    achieved one, so that a shortfall is visible at once.
    """
    if not any(method.devices for method in results.methods):
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
            "ticktext": [_two_lines(device.shown) for device in results.devices],
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
        (index + shift, method.devices[device.device])
        for index, device in enumerate(results.devices)
        if device.device in method.devices
    ]
    shared: Json = {
        "type": "bar",
        "orientation": "h",
        "name": drawn_text(method.name),
        "legendgroup": str(position),
        "y": [place for place, _ in rows],
        "customdata": [
            [ratio_text(each.requested_speedup), ratio_text(each.achieved_speedup)]
            for _, each in rows
        ],
        "hovertemplate": "<b>%{fullData.name}</b><br>asked %{customdata[0]}"
        "<br>achieved %{customdata[1]}<extra></extra>",
    }
    frame = {
        **shared,
        "x": [each.requested_speedup for _, each in rows],
        "width": 0.82 * slot,
        "marker": {"color": style.faint(0.12), "line": {"color": style.colour, "width": 1.5}},
    }
    bar = {
        **shared,
        "x": [each.achieved_speedup for _, each in rows],
        "width": 0.42 * slot,
        "marker": {
            "color": style.colour,
            "line": {"width": 0},
            "pattern": {"shape": "" if style.dash == "solid" else "/"},
        },
    }
    return frame, bar


def _two_lines(label: str) -> str:
    """Break a long label at the space nearest to its middle."""
    spaces = [index for index, letter in enumerate(label) if letter == " "]
    if len(label) <= 12 or not spaces:
        return drawn_text(label)
    middle = min(spaces, key=lambda index: abs(index - len(label) / 2))
    return f"{drawn_text(label[:middle])}<br>{drawn_text(label[middle + 1 :])}"


def coverage_map(results: Results, device: DeviceClass, chosen: int) -> Figure:
    """Return a map per method of what the clients of a device class trained: rounds across, groups down.

    Only the map of the chosen method is visible.
    """
    tables = [shares for method in results.methods for shares in method.coverage.values()]
    rounds = max((len(shares) for shares in tables), default=0)
    named = len(results.groups)
    groups = max([named, *(len(row) for shares in tables for row in shares)])
    names = [*results.groups, *(f"group {index}" for index in range(named, groups))]
    maps = [
        _heatmap(
            # Three decimals: colours cannot show more, and the page stays small.
            pd.DataFrame([dict(enumerate(row)) for row in shares], dtype=float)
            .reindex(index=range(rounds), columns=range(groups))
            .round(3)
            .T,
            position,
            legendgroup=str(position),
            visible=position == chosen,
            x0=1,
            dx=1,
            zmax=1,
            hoverongaps=False,
            meta=[drawn_text(name) for name in names],
            hovertemplate="<b>%{text}</b><br>round %{x}<br>share %{z:.0%}<extra></extra>",
        )
        for position, method in enumerate(results.methods)
        if (shares := method.coverage.get(device.device))
    ]
    return figure(
        maps,
        min(max(72 + 16 * groups, 170), 420),
        xaxis={
            "title": {"text": "round"}, "range": [0.5, rounds + 0.5], "nticks": 6, "tickformat": "d",
            "showgrid": False, "zeroline": False,
        },
        yaxis=_row_names(names),
    )  # fmt: skip


def label_split(results: Results) -> Figure | None:
    """Return the number of examples by client (down) and class (across) as a map."""
    if not results.labels or not results.labels[0]:
        return None
    held = pd.DataFrame(results.labels)
    shown = _heatmap(
        held, 0, zmax=max(1, *map(max, results.labels)),
        hovertemplate="client %{y}<br>class %{x}<br>%{z} examples<extra></extra>",
    )  # fmt: skip
    return figure(
        [shown],
        min(max(90 + 16 * len(held), 170), 420),
        xaxis={"title": {"text": "class"}, "tickformat": "d", "showgrid": False, "zeroline": False},
        yaxis={
            "title": {"text": "client"}, "range": [len(held) - 0.5, -0.5], "tickformat": "d", "nticks": 12,
            "showgrid": False, "zeroline": False,
        },
    )  # fmt: skip


def _heatmap(cells: pd.DataFrame, position: int, **more: object) -> Json:
    """Return a map in the colour of a method; unknown cells are empty."""
    rows, columns = cells.shape
    return {
        "type": "heatmap",
        "z": cells.astype(object).where(cells.notna(), None).values.tolist(),
        "zmin": 0,
        "showscale": False,
        "colorscale": [[0, EMPTY], [1, ink(position).colour]],
        "xgap": 0 if columns > _MANY_CELLS else 1,
        "ygap": 0 if rows > _MANY_CELLS else 1,
        **more,
    }


def _row_names(names: Sequence[str]) -> dict[str, object]:
    """Return a vertical axis of rows, from top to bottom."""
    ticks = row_ticks(names)
    return {
        "tickvals": [row for row, _ in ticks],
        "ticktext": [drawn_text(name) for _, name in ticks],
        "range": [len(names) - 0.5, -0.5],
        "showgrid": False,
        "zeroline": False,
    }
