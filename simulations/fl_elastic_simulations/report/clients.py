"""Who the clients of a simulation are, what each spent, and how good the last model is for it; what groups cost."""

from __future__ import annotations

from fl_elastic_simulations.report.document import Figure, figure
from fl_elastic_simulations.report.formats import (
    MISSING,
    accuracy_text,
    bytes_text,
    percent_text,
    seconds_text,
)
from fl_elastic_simulations.report.palette import EMPTY, ink
from fl_elastic_simulations.report.summary import Client, Results
from fl_elastic_simulations.report.table import Grid

__all__ = ["clients_grid", "costs_grid", "label_split", "spread_grid"]

_MANY = 40


def spread_grid(results: Results) -> Grid | None:
    """Return a row per method: how good its last model is for the worst client and the tenth percentile."""
    methods = [method for method in results.methods if method.clients]
    rows = tuple(
        (
            method.name,
            accuracy_text(method.worst_client),
            accuracy_text(method.tenth_percentile),
            accuracy_text(
                max((c.accuracy for c in method.clients if c.accuracy is not None), default=None)
            ),
        )
        for method in methods
    )
    return (
        Grid(("Method", "Worst client", "Tenth percentile", "Best client"), rows) if rows else None
    )


def clients_grid(results: Results) -> Grid | None:
    """Return a row per client: its data, and under each method accuracy, rounds, busy time and bytes sent."""
    methods = [method for method in results.methods if method.clients]
    if not methods:
        return None
    labels = {device.name: device.label for device in results.devices}
    headings = ["Client", "Device", "Examples"]
    for method in methods:
        headings += [f"{method.name}: {what}" for what in ("accuracy", "rounds", "busy", "sent")]
    rows = []
    for index, first in enumerate(methods[0].clients):
        row = [str(index), labels.get(first.device, first.device), _whole(first.examples)]
        for method in methods:
            row += _cells(method.clients[index]) if index < len(method.clients) else [MISSING] * 4
        rows.append(tuple(row))
    return Grid(tuple(headings), tuple(rows))


def _cells(client: Client) -> list[str]:
    return [
        accuracy_text(client.accuracy),
        _whole(client.rounds),
        seconds_text(client.seconds),
        bytes_text(client.uplink_bytes),
    ]


def _whole(number: float | None) -> str:
    return MISSING if number is None else f"{number:g}" if number % 1 == 0 else f"{number:.1f}"


def costs_grid(results: Results) -> Grid | None:
    """Return a row per tensor group, the one next to the loss first: weights, milliseconds, importance.

    Importance has a column for each method whose clients know it.
    """
    methods = [method for method in results.methods if method.importance]
    rows = tuple(
        (
            cost.name,
            _whole(cost.weights),
            *(
                MISSING if seconds is None else f"{1000 * seconds:.2f} ms"
                for seconds in (cost.update_seconds, cost.path_seconds)
            ),
            *(percent_text(method.importance.get(cost.name)) for method in methods),
        )
        for cost in results.costs
    )
    headings = ["Group", "Weights", "Own gradient", "Way there"]
    headings += [f"{method.name}: importance" for method in methods]
    return Grid(tuple(headings), rows) if rows else None


def label_split(results: Results) -> Figure | None:
    """Return how the classes are spread over the clients: clients down, classes across, examples as colour."""
    if not results.labels or not results.labels[0]:
        return None
    most = max(map(max, results.labels))
    clients, classes = len(results.labels), len(results.labels[0])
    return figure(
        [
            {
                "type": "heatmap",
                "z": [list(row) for row in results.labels],
                "zmin": 0,
                "zmax": max(most, 1),
                "showscale": False,
                "colorscale": [[0, EMPTY], [1, ink(0).colour]],
                "xgap": 0 if classes > _MANY else 1,
                "ygap": 0 if clients > _MANY else 1,
                "hovertemplate": "client %{y}<br>class %{x}<br>%{z} examples<extra></extra>",
            }
        ],
        min(max(90 + 16 * clients, 170), 420),
        xaxis={"title": {"text": "class"}, "tickformat": "d", "showgrid": False, "zeroline": False},
        yaxis={
            "title": {"text": "client"}, "range": [clients - 0.5, -0.5], "tickformat": "d", "nticks": 12,
            "showgrid": False, "zeroline": False,
        },
    )  # fmt: skip
