"""Metrics that clients report: which of them a server accepts, and their means over clients."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping
from itertools import islice
from typing import Any

from flwr.app import MetricRecord, RecordDict

from fl_elastic.errors import UpdateError

_LOG = logging.getLogger("fl_elastic")
# Limits: number of metrics, characters of a name; number of left-out metrics in a message, characters shown of
# each.
_MOST, _LONGEST, _NAMED, _SHOWN = 256, 200, 5, 60
# Largest number of different metric names in one round.
_MOST_TOGETHER = 512
# Prefix of the library's own entries in replies.
_OWN = "fl_elastic."
# Names of the mean loss and the number of examples, which every evaluation has.
_OF_A_REPLY = ("loss", "num-examples")
# Entries with text values, of a fit's report and of a device's capabilities.
_TEXTS = ("based-on", "device", "group-costs")
_BEYOND = 1e308


def believed_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    r"""Return the finite numbers among metrics, at most 256, with printable names of at most 200 characters.

    See `left_out_of` for the others. A tracker that allows fewer characters in names has to replace them.

    Examples
    --------
    >>> believed_metrics({"loss": 0.5, "mAP_0.5:0.95": 1, "bad\nname": 3, "x": float("nan"), "ok": True})
    {'loss': 0.5, 'mAP_0.5:0.95': 1}
    """
    good = (name for name, value in metrics.items() if not _fault(name, value))
    return {name: metrics[name] for name in islice(good, _MOST)}


def left_out_of(metrics: Mapping[str, Any]) -> str:
    r"""Return which of a client's metrics are left out, and why; empty if none is.

    Examples
    --------
    >>> left_out_of({"loss": 0.5, "bad\nname": 3, "note": "hello", "fl_elastic.have": 4})
    "'bad\\nname' (no name that can be shown), 'note' (no finite number)"
    """
    faults = [
        (name, fault)
        for name, value in metrics.items()
        if not _is_own(name) and (fault := _fault(name, value))
    ]
    beyond = sum(not _fault(name, value) for name, value in metrics.items()) - _MOST
    said = [f"{str(name)[:_SHOWN]!r} ({fault})" for name, fault in faults[:_NAMED]]
    if len(faults) > _NAMED:
        said.append(f"{len(faults) - _NAMED} more")
    if beyond > 0:
        said.append(f"{beyond} beyond the first {_MOST}")
    return ", ".join(said)


def refuse_metrics(metrics: Mapping[str, Any]) -> None:
    """Raise UpdateError if a server would leave out some of these metrics."""
    own = [name for name in metrics if name.startswith(_OWN) or name in _OF_A_REPLY]
    left = left_out_of(metrics) or ", ".join(
        f"{name[:_SHOWN]!r} (the library's own)" for name in own
    )
    if left:
        raise UpdateError(
            f"metrics that no server would keep: {left}. Give finite numbers under at most {_MOST} names, of at "
            f"most {_LONGEST} printable characters"
        )


def warn_of_left_out(metrics: Mapping[str, Any]) -> None:
    """Log the metrics that a server will leave out."""
    left = left_out_of(metrics)
    if left:
        _LOG.warning("the server will leave metrics out: %s", left)


def _is_own(name: object) -> bool:
    """Return whether the library itself adds this entry to a reply; such an entry is not a metric of the user."""
    return str(name).startswith(_OWN) or name in _TEXTS


def _fault(name: object, value: object) -> str:
    """Return what is wrong with a metric; empty if nothing is."""
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST or not name.isprintable():
        return "no name that can be shown"
    if name.startswith(_OWN):
        return "the library's own"
    return "" if _is_number(value) else "no finite number"


def _is_number(value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return -_BEYOND <= value <= _BEYOND and math.isfinite(value)


def completed_metrics(contents: list[RecordDict], weighted_by: str) -> list[RecordDict]:
    """Give every client all metrics that any client sent, because Flower ends the run over unequal keys.

    A client without a metric gets the weighted mean over the clients that sent it, so that the weighted mean over
    all clients does not change. For such a metric every client also gets NAME-clients, the number of clients that
    sent it. If there are more than 512 names, those that most clients sent are kept.

    Examples
    --------
    >>> sent = [{"n": 2, "map": 0.25}, {"n": 2, "map": 0.75}, {"n": 4}]
    >>> found = completed_metrics([RecordDict({"metrics": MetricRecord(each)}) for each in sent], "n")
    >>> sorted(found[2]["metrics"].items())
    [('map', 0.5), ('map-clients', 2), ('n', 4)]
    """
    records: list[dict[str, Any]] = [
        dict(content.metric_records["metrics"]) for content in contents
    ]
    having = Counter(name for record in records for name in record)
    ranked = sorted(having, key=lambda name: -having[name])
    if len(ranked) > _MOST_TOGETHER:
        _LOG.warning(
            "%s metrics that few clients sent are left out, such as %s",
            len(ranked) - _MOST_TOGETHER, ", ".join(ranked[_MOST_TOGETHER:][:3]),
        )  # fmt: skip
    filled: dict[str, Any] = {}
    for name in ranked[:_MOST_TOGETHER]:
        if having[name] < len(records):
            sent = [(record[weighted_by], record[name]) for record in records if name in record]
            total = sum(weight for weight, _ in sent)
            filled[name] = sum(weight * value for weight, value in sent) / total
            if f"{name}-clients" not in having:
                filled[f"{name}-clients"] = having[name]
    kept = {*ranked[:_MOST_TOGETHER], *filled}
    return [
        RecordDict(
            {"metrics": MetricRecord({k: v for k, v in (filled | record).items() if k in kept})}
        )
        for record in records
    ]


def mean_metrics(contents: list[RecordDict], weighted_by: str) -> MetricRecord:
    """Return the weighted mean of metrics that all records have, with the summed weight."""
    records: list[dict[str, Any]] = [
        dict(content.metric_records["metrics"]) for content in contents
    ]
    total = sum(record[weighted_by] for record in records)
    names = [name for name in records[0] if name != weighted_by]
    means = {
        name: sum(record[weighted_by] * record[name] for record in records) / total
        for name in names
    }
    return MetricRecord({**means, weighted_by: total})
