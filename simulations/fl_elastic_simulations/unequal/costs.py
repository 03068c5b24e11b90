"""What a message costs on the reference host: measured by its node, or as a fleet's table says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import cast

from flwr.app import Message, RecordDict

from fl_elastic.errors import ScenarioError
from fl_elastic_simulations.unequal.fleet import CostSection

__all__ = ["CostOf", "HostCost", "given_costs", "size_of"]

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
    """

    seconds: float
    downlink_bytes: float
    uplink_bytes: float
    peak_bytes: float


CostOf = Callable[[Message, Message, HostCost | None], HostCost]
"""Returns what a message cost, from itself, its reply, and what the node measured if it did."""


def given_costs(table: Mapping[str, CostSection]) -> CostOf:
    """Return what takes seconds and memory from a fleet's table of costs, and for other types as measured."""

    def costs(message: Message, reply: Message, measured: HostCost | None) -> HostCost:
        if measured is None:
            raise ScenarioError(
                f"node {message.metadata.dst_node_id} did not measure a message of type "
                f"{message.metadata.message_type!r}: give its app the mod, as in ClientApp(mods=[measuring_mod])"
            )
        kind = message.metadata.message_type
        given = table.get(kind, table.get(kind.partition(".")[0]))
        if given is None:
            return measured
        examples = _examples(reply) if given.seconds_per_example else 0.0
        seconds = given.seconds + given.seconds_per_example * examples
        peak = measured.peak_bytes if given.peak_bytes is None else given.peak_bytes
        return replace(measured, seconds=seconds, peak_bytes=peak)

    return costs


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
    """Return bytes as Flower's `message_size_mod` counts them."""
    return sum(record.count_bytes() for record in content.values())
