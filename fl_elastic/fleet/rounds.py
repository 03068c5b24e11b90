"""Reports of the nodes in their last rounds, from ``rounds.jsonl``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_NUMBERS = {
    "step_seconds": "step_seconds",
    "temperature": "temperature_celsius",
    "coverage": "coverage",
    "disk_free_bytes": "disk_free_bytes",
}


@dataclass(frozen=True)
class NodeRound:
    """Report of a node in its last round; everything but the round may be unknown.

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
