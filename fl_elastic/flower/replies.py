"""Small pure functions on the replies of a round: their order, their metrics, their words."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

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
    means: dict[str, float] = {}
    total: int | float = 0
    for content in contents:
        record = {k: v for k, v in content.metric_records["metrics"].items() if not _listed(v)}
        weight = record.pop(weighted_by)
        total += weight
        for name, value in record.items():
            means[name] = means.get(name, 0.0) + weight * value
    return MetricRecord({name: sum_ / total for name, sum_ in means.items()} | {weighted_by: total})


def one_line(reason: str) -> str:
    """Shorten what a client says to one line, so that it can neither flood nor forge the log.

    >>> one_line("no" + chr(10) + "memory")
    'no memory'
    """
    words = " ".join(reason.split())
    return words if len(words) <= _LONGEST else f"{words[:_LONGEST]}..."
