"""Figures of what lasts from round to round: where the fleet's cut lay, and which features were found again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from fl_elastic_simulations.report.document import Figure, drawn_text, figure
from fl_elastic_simulations.report.figures import row_names
from fl_elastic_simulations.report.formats import seconds_text, time_unit
from fl_elastic_simulations.report.palette import ink
from fl_elastic_simulations.report.summary import Cut, Method, Point, Results

__all__ = ["cuts_by_time", "found_by_time", "row_of_cut"]

Json = Mapping[str, object]
# Lines of one cut lie beside each other instead of upon each other.
_BESIDE = 0.12


def cuts_by_time(results: Results) -> Figure | None:
    """Return the deepest group that was trained against time, a line per method and seed; None without any cut."""
    ended = {i: _ends(method) for i, method in enumerate(results.methods) if method.cuts}
    largest = max((end for ends in ended.values() for end in ends.values()), default=None)
    if largest is None or not results.groups:
        return None
    unit = time_unit(largest)
    traces = [
        _stairs(results, position, [c for c in results.methods[position].cuts if c.seed == seed], end, unit.size)
        for position, ends in ended.items()
        for seed, end in ends.items()
    ]  # fmt: skip
    return figure(
        traces,
        min(max(72 + 16 * len(results.groups), 170), 420),
        xaxis={"title": {"text": f"{_clock(results)} ({unit.name})"}, "rangemode": "tozero"},
        yaxis=row_names(results.groups),
    )


def found_by_time(results: Results) -> Figure | None:
    """Return the share of examples whose features were found, between tests; None where no history counts them."""
    courses = {i: _found(method.history) for i, method in enumerate(results.methods)}
    courses = {i: course for i, course in courses.items() if course}
    if not courses:
        return None
    unit = time_unit(max(row[0] for course in courses.values() for row in course))
    traces: list[Json] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": drawn_text(results.methods[position].name),
            "legendgroup": str(position),
            "x": [seconds / unit.size for seconds, _, _ in course],
            "y": [found / (found + computed) for _, found, computed in course],
            "customdata": [
                [seconds_text(seconds), f"{found:,}", f"{computed:,}"] for seconds, found, computed in course
            ],
            "line": {"color": ink(position).colour, "dash": ink(position).dash, "width": 2.5},
            "marker": {"color": ink(position).colour, "size": 6},
            "hovertemplate": "<b>%{fullData.name}</b><br>until %{customdata[0]}<br>%{customdata[1]} found, "
            "%{customdata[2]} computed<extra></extra>",
        }
        for position, course in courses.items()
    ]  # fmt: skip
    return figure(
        traces,
        260,
        xaxis={"title": {"text": f"{_clock(results)} ({unit.name})"}, "rangemode": "tozero"},
        yaxis={"title": {"text": "features found"}, "tickformat": ".0%", "range": [-0.03, 1.03]},
    )


def row_of_cut(group: str, groups: Sequence[str]) -> int:
    """Return the row of the deepest group that is trained under a cut, the last one where there is no cut.

    >>> row_of_cut("body", ["head", "body.1", "body.0", "stem"]), row_of_cut("", ["head", "stem"])
    (2, 1)
    """
    rows = [i for i, name in enumerate(groups) if name == group or name.startswith(f"{group}.")]
    return rows[-1] if group and rows else len(groups) - 1


def _stairs(results: Results, position: int, cuts: Sequence[Cut], end: float, size: float) -> Json:
    """Return the line of one seed: each cut until the next one, the last until the end."""
    times = [cut.seconds or 0.0 for cut in cuts]
    shift = (position - (len(results.methods) - 1) / 2) * _BESIDE
    rows = [row_of_cut(cut.group, results.groups) + shift for cut in cuts]
    until = [min(since, end) for since in times[1:]] + [end]
    told = [[cut.group or "everything is trained", seconds_text(cut.seconds)] for cut in cuts]
    style = ink(position)
    return {
        "type": "scatter",
        "mode": "lines",
        "name": drawn_text(results.methods[position].name),
        "legendgroup": str(position),
        "x": [each / size for pair in zip(times, until, strict=True) for each in pair],
        "y": [row for row in rows for _ in range(2)],
        "customdata": [[drawn_text(text) for text in each] for each in told for _ in range(2)],
        "line": {"color": style.colour, "dash": style.dash, "width": 3},
        "hovertemplate": "<b>%{fullData.name}</b><br>trained from %{customdata[0]} up<br>"
        "since %{customdata[1]}<extra></extra>",
    }


def _ends(method: Method) -> dict[int, float]:
    """Return the last known second of each seed with a cut."""
    ends: dict[int, float] = {}
    for cut in method.cuts:
        ends[cut.seed] = max(ends.get(cut.seed, 0.0), cut.seconds or 0.0)
    for point in method.history:
        if point.seed in ends:
            ends[point.seed] = max(ends[point.seed], point.seconds or 0.0)
    return ends


def _found(history: Sequence[Point]) -> list[tuple[float, int, int]]:
    """Return seconds, and features found and computed since the test before, of all seeds at each round.

    >>> start, later = Point(0, 0, 0.1, 0.0, 0.0), Point(0, 1, 0.2, 9.0, 0.0, None, 6, 2)
    >>> _found([start, later])
    [(9.0, 6, 2)]
    """
    by_seed: dict[int, list[Point]] = {}
    for point in sorted(history, key=lambda point: point.round):
        by_seed.setdefault(point.seed, []).append(point)
    rows: dict[int, list[tuple[float, int, int]]] = {}
    for points in by_seed.values():
        for before, point in pairwise(points):
            found, computed = point.features_found, point.features_computed
            if point.seconds is not None and found is not None and computed is not None:
                since = (before.features_found or 0, before.features_computed or 0)
                rows.setdefault(point.round, []).append(
                    (point.seconds, found - since[0], computed - since[1])
                )
    course = []
    for each in rows.values():
        found, computed = sum(row[1] for row in each), sum(row[2] for row in each)
        if found + computed:
            course.append((sum(row[0] for row in each) / len(each), found, computed))
    return course


def _clock(results: Results) -> str:
    return "simulated time" if results.simulated else "time"
