"""The partition of each of Flower's nodes, as reported by the `measuring_mod` of their apps."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import cast

from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid

from fl_elastic.errors import ScenarioError
from fl_elastic_simulations.unequal.measuring import RECORD, who_record

KINDS = ("train", "evaluate", "query")
"""Types of the messages to which apps answer, unless they have functions for types of their own alone."""


class SilentNodesError(ScenarioError):
    """Nodes do not say which partition they have."""


def partitions_of(
    grid: Grid, nodes: Collection[int], kinds: Iterable[str] = KINDS
) -> dict[int, int]:
    """Return the partition of each node by the node's number, which Flower draws anew for each run.

    Parameters
    ----------
    grid : Grid
        Reaches the nodes.
    nodes : collection of int
        Their numbers.
    kinds : iterable of str
        Types of the messages that ask: an app does not answer messages of a type for which it has no function.

    Raises
    ------
    SilentNodesError
        If a node's app has no `measuring_mod`, or no function for any of these types.
    """
    found: dict[int, int] = {}
    for kind in kinds:
        asked = [Message(who_record(), node, kind) for node in nodes if node not in found]
        for reply in grid.send_and_receive(asked) if asked else ():
            record = None if reply.has_error() else reply.content.get(RECORD)
            if isinstance(record, ConfigRecord):
                (partition,) = record.values()
                found[reply.metadata.src_node_id] = cast(int, partition)
    silent = [node for node in nodes if node not in found]
    if silent:
        raise SilentNodesError(
            f"{len(silent)} of {len(nodes)} nodes do not measure: give their app the mod, as in "
            "ClientApp(mods=[measuring_mod]), a function for one of the message types "
            f"{', '.join(kinds)}, and nodes a 'partition-id' in their config"
        )
    return found
