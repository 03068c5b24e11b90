"""Costs of a message on the reference host: measured by its node, or taken from a fleet's table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fl_elastic.errors import ScenarioError
from fl_elastic_simulations.unequal.fleet import CostSection

_EXAMPLES = ("num-examples", "num_examples")


@dataclass(frozen=True)
class HostCost:
    """Costs of a message, before they are converted to a device.

    Parameters
    ----------
    seconds : float
        Seconds on one core of the reference host.
    downlink_bytes, uplink_bytes : float
        Bytes of the message and of its reply.
    peak_bytes : float
        Most memory in bytes that handling it takes.
    host : str
        Machine and process that measured it.
    """

    seconds: float
    downlink_bytes: float
    uplink_bytes: float
    peak_bytes: float
    host: str = ""


CostOf = Callable[[Message, Message], HostCost]
"""Returns the cost of a message, given the message and its reply."""


def charged(measured: HostCost, table: Mapping[str, CostSection], reply: Message) -> HostCost:
    """Return the cost of a message: from the fleet's table for its type, or else as measured.

    Raises
    ------
    ScenarioError
        If the table charges by examples, and the reply does not report their number.
    """
    kind = reply.metadata.message_type
    given = table.get(kind, table.get(kind.partition(".")[0]))
    if given is None:
        return measured
    examples = _examples(reply) if given.seconds_per_example else 0.0
    seconds = given.seconds + given.seconds_per_example * examples
    peak = measured.peak_bytes if given.peak_bytes is None else given.peak_bytes
    return replace(measured, seconds=seconds, peak_bytes=peak)


def _examples(reply: Message) -> float:
    for record in reply.content.metric_records.values():
        for key in _EXAMPLES:
            if key in record:
                return float(cast(float, record[key]))
    raise ScenarioError(
        f"the reply of node {reply.metadata.src_node_id} counts no {_EXAMPLES[0]!r}, by which the fleet's costs "
        "charge: give it seconds for each message instead"
    )


def size_of(content: RecordDict) -> int:
    """Return the bytes of all records by Flower's rules, including empty texts, which Flower refuses to count."""
    return sum(map(_record_size, content.values()))


def _record_size(record: ArrayRecord | MetricRecord | ConfigRecord) -> int:
    if isinstance(record, ArrayRecord):
        return record.count_bytes()
    return sum(len(key) + _value_size(value) for key, value in record.items())


def _value_size(value: object) -> int:
    if isinstance(value, list):
        return sum(map(_value_size, value))
    if isinstance(value, (str, bytes)):
        return len(value)
    return 1 if isinstance(value, bool) else 8
