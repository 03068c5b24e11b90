"""Prometheus metrics from the newest entry of a journal."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from fl_elastic.errors import FleetError
from fl_elastic.monitoring.journal import Journal

_PREFIX = "fl_elastic"
_TOTAL = "_total"
_LABELS = {"nodes": "node", "groups": "group"}
# Limits for one table, because a node may report anything: count of numbers, length of a name, absolute value.
_MOST, _LONGEST, _BEYOND = 512, 200, 1e308
_ODD = re.compile(r"[^a-zA-Z0-9_]")


@dataclass(frozen=True)
class Metric:
    """One number with its name and labels; a name that ends in ``_total`` is a counter."""

    name: str
    value: float
    labels: dict[str, str] = field(default_factory=dict)


def journal_metrics(entry: Mapping[str, Any] | None, now: float) -> list[Metric]:
    """Return the numbers in a journal's entry, and the entry's age, as metrics.

    Parameters
    ----------
    entry : mapping or None
        The entry. Tables under ``nodes`` and ``groups`` become metrics with a label; other tables and texts are
        left out.
    now : float
        Present time in seconds since 1970.

    Examples
    --------
    >>> for metric in journal_metrics({"round": 3, "nodes": {"pi0": {"steps": 4}}}, now=0.0):
    ...     print(metric.name, metric.labels, metric.value)
    fl_elastic_up {} 1.0
    fl_elastic_round {} 3.0
    fl_elastic_node_steps {'node': 'pi0'} 4.0
    """
    metrics = [Metric(f"{_PREFIX}_up", float(entry is not None))]
    if entry is None:
        return metrics
    written = entry.get("time")
    if isinstance(written, (int, float)):
        metrics.append(
            Metric(f"{_PREFIX}_seconds_since_last_entry", max(now - float(written), 0.0))
        )
    metrics += _numbers(entry, _PREFIX, {})
    for table, label in _LABELS.items():
        members = entry.get(table)
        if isinstance(members, dict):
            for name, values in members.items():
                if isinstance(values, dict):
                    metrics += _numbers(values, f"{_PREFIX}_{label}", {label: str(name)})
    return _apart(metrics)


def _apart(metrics: list[Metric]) -> list[Metric]:
    """Drop metrics whose name and labels repeat, and those whose name was used with other label names."""
    found: dict[tuple[str, ...], Metric] = {}
    labels: dict[str, tuple[str, ...]] = {}
    for metric in metrics:
        if labels.setdefault(metric.name, tuple(metric.labels)) == tuple(metric.labels):
            found.setdefault((metric.name, *metric.labels.values()), metric)
    return list(found.values())


def _numbers(entry: Mapping[str, Any], prefix: str, labels: dict[str, str]) -> list[Metric]:
    """Return a table's numbers under names that Prometheus accepts; a name that occurs again gets a number."""
    numbers = ((str(key), value) for key, value in entry.items() if _is_number(value))
    found: dict[str, float] = {}
    for key, value in islice(numbers, _MOST):
        name = plain = f"{prefix}_{_ODD.sub('_', key[:_LONGEST])}"
        count = 1
        while name in found:
            count += 1
            name = f"{plain}_{count}"
        found[name] = float(value)
    return [Metric(name, value, labels) for name, value in found.items()]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and -_BEYOND <= value <= _BEYOND


class _Collector:
    """Reads the journal at each scrape."""

    def __init__(self, path: Path) -> None:
        self._journal = Journal(path)

    def collect(self) -> Iterable[Any]:
        """Return the metric families, as prometheus_client expects them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, Any] = {}
        for metric in journal_metrics(self._journal.last(), time.time()):
            names, values = list(metric.labels), list(metric.labels.values())
            family = families.get(metric.name)
            if family is None:
                kind = CounterMetricFamily if metric.name.endswith(_TOTAL) else GaugeMetricFamily
                text = metric.name.removeprefix(f"{_PREFIX}_").replace("_", " ")
                family = families[metric.name] = kind(metric.name, text, labels=names)
            family.add_metric(values, metric.value)
        return list(families.values())

    def describe(self) -> Iterable[Any]:
        """Announce no metric in advance."""
        return []


def serve_metrics(path: str | Path, *, address: str = "127.0.0.1", port: int = 9464) -> Any:
    """Serve the newest entry of a journal as Prometheus text under ``/metrics``; return the running server.

    The server only reads the file, so it keeps running when the process that writes the file is restarted.

    Parameters
    ----------
    path : path-like
        The journal; it may not exist yet.
    address : str
        Address to listen on: by default reachable from this machine only, since there is no password.
    port : int
        Port to listen on; 0 for any.

    Raises
    ------
    FleetError
        If prometheus-client is not installed or the port is taken.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        raise FleetError(
            "prometheus-client is not installed: python -m pip install prometheus-client"
        ) from None
    registry = CollectorRegistry()
    registry.register(_Collector(Path(path)))
    try:
        server, _ = start_http_server(port, addr=address, registry=registry)
    except OSError as error:
        raise FleetError(f"cannot serve metrics on {address}:{port}: {error.strerror}") from None
    return server
