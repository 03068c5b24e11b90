"""What happened in one round, for logs, simulations and reports."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

__all__ = ["AcceptedReply", "Rejection", "RoundRecord", "log_record"]

_LOG = logging.getLogger("fl_elastic")


@dataclass(frozen=True)
class AcceptedReply:
    """One client's merged update.

    Attributes
    ----------
    node_id : int
        Who sent it.
    steps : dict of str to int
        In how many local steps each tensor was trained.
    num_examples : int
        Weight of the client.
    uplink_bytes : int
        Size of the packed update.
    metrics : dict
        Numbers that came with it.
    downlink_bytes : int
        What the client was sent in this round; 0 for an update that is late.
    staleness : int
        Rounds that it is late.
    """

    node_id: int
    steps: dict[str, int]
    num_examples: int
    uplink_bytes: int
    metrics: dict[str, Any]
    downlink_bytes: int = 0
    staleness: int = 0


@dataclass(frozen=True)
class Rejection:
    """A reply that was not merged, and why."""

    server_round: int
    node_id: int
    reason: str


@dataclass
class RoundRecord:
    """One round of training.

    Attributes
    ----------
    server_round : int
        Its number.
    deadline : float, optional
        Seconds that clients were given.
    downlink_bytes : int
        Size of the whole model as it is sent.
    downlink_total_bytes : int
        Size of all training messages together.
    accepted, rejected : list
        Replies, in the order in which they were merged.
    stayed : dict of str to int
        Tensors that too few clients trained for a robust rule, and how many did.
    shortened : dict of int to int
        Nodes that changed tensors by many times more than is usual, and how many tensors.
    stepped_back : str
        Why the round's updates were dropped and the model before was put back; empty where it was not.
    """

    server_round: int
    deadline: float | None = None
    downlink_bytes: int = 0
    downlink_total_bytes: int = 0
    accepted: list[AcceptedReply] = field(default_factory=list)
    rejected: list[Rejection] = field(default_factory=list)
    stayed: dict[str, int] = field(default_factory=dict)
    shortened: dict[int, int] = field(default_factory=dict)
    stepped_back: str = ""


def log_record(record: RoundRecord, rule: str) -> None:
    """Log what a round did not believe."""
    number = record.server_round
    if record.stayed:
        some = " ".join(", ".join(list(record.stayed)[:3]).split())
        _LOG.warning(
            "round %s: %s tensors stay, as too few clients trained them for rule %r: %s",
            number, len(record.stayed), rule, some,
        )  # fmt: skip
    if record.shortened:
        nodes = ", ".join(map(str, list(record.shortened)[:5]))
        _LOG.warning(
            "round %s: changes by node %s were many times larger than usual and shortened",
            number,
            nodes,
        )
    if record.stepped_back:
        _LOG.warning(
            "round %s: %s: the model before the last round is put back, and steps are no longer than the clients' "
            "from here on",
            number, record.stepped_back,
        )  # fmt: skip
