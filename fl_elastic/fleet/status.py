"""Status of each node of a fleet, from the inventory, the SuperLink and the last rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fl_elastic.fleet.flower_cli import NodeState
from fl_elastic.fleet.inventory import Inventory, Node
from fl_elastic.fleet.rounds import NodeRound


@dataclass(frozen=True)
class NodeStatus:
    """Status of one node.

    Parameters
    ----------
    name : str
        Name of the node, or its id if it is not in the inventory.
    node_id : str, optional
        Id of the node at the SuperLink.
    state : str
        ``online``, ``offline``, ``registered`` (never seen), ``unregistered``, ``revoked`` or ``unknown``.
    last_seen : str, optional
        Since when it is online, or when it went offline, in UTC.
    last : NodeRound, optional
        Its report from its last round.
    """

    name: str
    node_id: str | None
    state: str
    last_seen: str | None = None
    last: NodeRound | None = None


def fleet_status(
    inventory: Inventory, states: Sequence[NodeState] | None, rounds: Mapping[str, NodeRound]
) -> list[NodeStatus]:
    """Return the status of all nodes, those of the inventory first.

    Parameters
    ----------
    inventory : Inventory
        The fleet.
    states : sequence of NodeState, optional
        Nodes as the SuperLink reports them; ``None`` if it does not answer.
    rounds : mapping of str to NodeRound
        Last reports by node id or name.
    """
    by_id = {state.node_id: state for state in states or ()}
    found = [_status(node, by_id, states is not None, rounds) for node in inventory.nodes]
    known = {node.node_id for node in inventory.nodes}
    # Nodes registered by a command that ended before it could save the id.
    strangers = [s for s in by_id.values() if s.node_id not in known and s.status != "unregistered"]
    return found + [
        NodeStatus(s.node_id, s.node_id, s.status, _seen(s), rounds.get(s.node_id))
        for s in strangers
    ]


def _status(
    node: Node, by_id: Mapping[str, NodeState], answered: bool, rounds: Mapping[str, NodeRound]
) -> NodeStatus:
    seen = by_id.get(node.node_id or "")
    last = rounds.get(node.node_id or "") or rounds.get(node.name)
    if node.revoked:
        state = "revoked"
    elif not answered:
        state = "unknown"
    else:
        state = seen.status if seen else "unregistered"
    return NodeStatus(node.name, node.node_id, state, _seen(seen), last)


def _seen(state: NodeState | None) -> str | None:
    if state is None:
        return None
    return state.online_at if state.status == "online" else state.offline_at or state.online_at
