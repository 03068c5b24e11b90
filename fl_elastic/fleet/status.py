"""Status of each node of a fleet, from the inventory, the SuperLink and its report in ``rounds.jsonl``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fl_elastic.fleet.flower_cli import NodeState
from fl_elastic.fleet.inventory import Inventory, Node

_NUMBERS = {
    "step_seconds": "step_seconds",
    "temperature": "temperature_celsius",
    "coverage": "coverage",
    "disk_free_bytes": "disk_free_bytes",
}


@dataclass(frozen=True)
class NodeRound:
    """Report of a node in its last round; all values except the round may be unknown.

    Parameters
    ----------
    round : int
        Number of the round.
    time : str, optional
        Time when it ended, as the server wrote it.
    step_seconds : float, optional
        Seconds of one training step.
    temperature : float, optional
        Temperature in degrees Celsius.
    coverage : float, optional
        Share of the tensor groups that the node has trained, 0 to 1.
    disk_free_bytes : float, optional
        Free bytes in the folder of its state.
    """

    round: int
    time: str | None = None
    step_seconds: float | None = None
    temperature: float | None = None
    coverage: float | None = None
    disk_free_bytes: float | None = None


def last_rounds(rounds: Iterable[dict[str, Any]]) -> dict[str, NodeRound]:
    """Return for each node, by id or name, its report from the last round in which it took part.

    Examples
    --------
    >>> last_rounds([{"round": 3, "nodes": {"pi0": {"step_seconds": 0.5}}}])["pi0"].step_seconds
    0.5
    """
    found: dict[str, NodeRound] = {}
    for record in rounds:
        number, nodes = _number(record.get("round")), record.get("nodes")
        if number is None or not isinstance(nodes, dict):
            continue
        time = record.get("time")
        for name, said in nodes.items():
            found[str(name)] = NodeRound(
                round=int(number),
                time=None if time is None else str(time),
                **_numbers(said),
            )
    return found


def _numbers(said: object) -> dict[str, float | None]:
    if not isinstance(said, dict):
        return {}
    return {key: _number(said.get(name, said.get(key))) for key, name in _NUMBERS.items()}


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


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
        Time at which it came online, or went offline, in UTC.
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
    unlisted = [s for s in by_id.values() if s.node_id not in known and s.status != "unregistered"]
    return found + [
        NodeStatus(s.node_id, s.node_id, s.status, _seen(s), rounds.get(s.node_id))
        for s in unlisted
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
