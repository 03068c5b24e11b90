"""The partition of each of Flower's nodes, as reported by the `measuring_mod` of their apps."""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid

from fl_elastic.errors import ScenarioError
from fl_elastic_simulations.unequal.measuring import RECORD, who_record

_KINDS = ("train", "evaluate", "query")


def partitions_of(grid: Grid, nodes: Collection[int]) -> dict[int, int]:
    """Return the partition of each node by the node's number, which Flower draws anew for each run.

    Raises
    ------
    ScenarioError
        If a node's app has no `measuring_mod`.
    """
    found: dict[int, int] = {}
    for kind in _KINDS:
        # An app does not answer messages of a type for which it has no function.
        asked = [Message(who_record(), node, kind) for node in nodes if node not in found]
        for reply in grid.send_and_receive(asked) if asked else ():
            record = None if reply.has_error() else reply.content.get(RECORD)
            if isinstance(record, ConfigRecord):
                (partition,) = record.values()
                found[reply.metadata.src_node_id] = cast(int, partition)
    silent = [node for node in nodes if node not in found]
    if silent:
        raise ScenarioError(
            f"{len(silent)} of {len(nodes)} nodes do not measure: give their app the mod, as in "
            "ClientApp(mods=[measuring_mod]), and nodes a 'partition-id' in their config"
        )
    return found
