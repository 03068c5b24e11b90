"""A fleet of real devices: its keys and inventory, its processes, and what state it is in.

Everything here drives Flower's own commands as processes; nothing imports Flower or torch. What runs on a node,
`node_app`, is loaded when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fl_elastic.flower.node_app import node_app

__all__ = [
    "node_app",
]


def __getattr__(name: str) -> Any:
    if name != "node_app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fl_elastic.flower.node_app import node_app

    return node_app
