"""What a message costs on the reference host: measured by its node, or as a fleet's table says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fl_elastic.errors import ScenarioError
from fl_elastic_simulations.unequal.fleet import CostSection

__all__ = ["CostOf", "HostCost", "charged", "size_of"]

_EXAMPLES = ("num-examples", "num_examples")


@dataclass(frozen=True)
class HostCost:
    """What a message costs, before it is made that of a device.

    Parameters
    ----------
    seconds : float
        Of one core of the reference host.
    downlink_bytes, uplink_bytes : float
        Of the message and of its reply.
    peak_bytes : float
        What handling it takes of memory.
    host : str
        Machine and process that measured.
    """

    seconds: float
    downlink_bytes: float
    uplink_bytes: float
    peak_bytes: float
    host: str = ""


CostOf = Callable[[Message, Message], HostCost]
"""Returns what a message cost, from itself and its reply."""


def charged(measured: HostCost, table: Mapping[str, CostSection], reply: Message) -> HostCost:
    """Return what a message costs: as a fleet's table says for its type, or as measured where it does not.

    Raises
    ------
    ScenarioError
        If the table charges by examples, and the reply does not count them.
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
    """Return the bytes of all records, as Flower counts them, which refuses to count an empty text."""
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
