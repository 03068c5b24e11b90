"""Small pure functions on the replies of a round: their order, their metrics, their words."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

from flwr.app import Message, MetricRecord, RecordDict

__all__ = ["common_metrics", "in_fixed_order", "mean_metrics", "one_line"]

_LONGEST = 500


def in_fixed_order(replies: Iterable[Message]) -> list[Message]:
    """Order replies by content, so that floating-point sums do not depend on who was faster."""

    def key(message: Message) -> tuple[int, str]:
        if message.has_error():
            return -1, ""
        content = message.content
        arrays = [array for record in content.array_records.values() for array in record.values()]
        # Evaluations have no arrays, and updates may be alike: what else they say decides.
        others = [*content.metric_records.items(), *content.config_records.items()]
        return zlib.crc32(b"".join(array.data for array in arrays)), str(others)

    return sorted(replies, key=key)


def common_metrics(contents: list[RecordDict]) -> list[RecordDict]:
    """Keep the metrics that every client sent: Flower ends the run over unequal keys."""
    records = [content.metric_records["metrics"] for content in contents]
    common = set.intersection(*(set(record) for record in records)) if records else set()
    return [
        RecordDict({"metrics": MetricRecord({k: v for k, v in record.items() if k in common})})
        for record in records
    ]


def mean_metrics(contents: list[RecordDict], weighted_by: str) -> MetricRecord:
    """Return the weighted mean of metrics that all clients sent, with the summed weight."""
    records: list[dict[str, Any]] = [dict(each.metric_records["metrics"]) for each in contents]
    total = sum(record[weighted_by] for record in records)
    names = [name for name in records[0] if name != weighted_by]
    means = {
        name: sum(record[weighted_by] * record[name] for record in records) / total
        for name in names
    }
    return MetricRecord({**means, weighted_by: total})


def one_line(reason: str) -> str:
    """Shorten what a client says to one line, so that it can neither flood nor forge the log.

    >>> one_line("no" + chr(10) + "memory")
    'no memory'
    """
    words = " ".join(reason.split())
    return words if len(words) <= _LONGEST else f"{words[:_LONGEST]}..."
