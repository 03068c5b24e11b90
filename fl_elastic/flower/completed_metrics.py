"""Fill in metrics that some clients of a round did not send, by the mean over those that did."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from flwr.app import MetricRecord, RecordDict

from fl_elastic.flower.round import one_line

_LOG = logging.getLogger("fl_elastic")
# Names that the clients of a round may have together.
_METRICS = 512


def completed_metrics(contents: list[RecordDict], weighted_by: str) -> list[RecordDict]:
    """Give every client all metrics that any client sent, because Flower ends the run over unequal keys.

    A client without a metric gets the weighted mean over those that sent it, so that the weighted mean over all
    clients does not change. Every client also gets NAME-clients, the number of clients that sent it. Of more than
    512 names, those that most clients sent are kept.

    Examples
    --------
    >>> sent = [{"n": 2, "map": 0.25}, {"n": 2, "map": 0.75}, {"n": 4}]
    >>> found = completed_metrics([RecordDict({"metrics": MetricRecord(each)}) for each in sent], "n")
    >>> sorted(found[2]["metrics"].items())
    [('map', 0.5), ('map-clients', 2), ('n', 4)]
    """
    records: list[dict[str, Any]] = [dict(each.metric_records["metrics"]) for each in contents]
    having = Counter(name for record in records for name in record)
    ranked = sorted(having, key=lambda name: -having[name])
    if len(ranked) > _METRICS:
        _LOG.warning(
            "%s metrics that few clients sent are left out, as %s",
            len(ranked) - _METRICS, one_line(", ".join(ranked[_METRICS:][:3])),
        )  # fmt: skip
    filled: dict[str, Any] = {}
    for name in ranked[:_METRICS]:
        if having[name] < len(records):
            sent = [(record[weighted_by], record[name]) for record in records if name in record]
            total = sum(weight for weight, _ in sent)
            filled[name] = sum(weight * value for weight, value in sent) / total
            if f"{name}-clients" not in having:
                filled[f"{name}-clients"] = having[name]
    kept = {*ranked[:_METRICS], *filled}
    return [
        RecordDict(
            {"metrics": MetricRecord({k: v for k, v in (filled | record).items() if k in kept})}
        )
        for record in records
    ]


def mean_metrics(contents: list[RecordDict], weighted_by: str) -> MetricRecord:
    """Return the weighted mean of metrics that all records have, with the summed weight."""
    records: list[dict[str, Any]] = [dict(each.metric_records["metrics"]) for each in contents]
    total = sum(record[weighted_by] for record in records)
    names = [name for name in records[0] if name != weighted_by]
    means = {
        name: sum(record[weighted_by] * record[name] for record in records) / total
        for name in names
    }
    return MetricRecord({**means, weighted_by: total})
