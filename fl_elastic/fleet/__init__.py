"""A fleet of real devices: its keys and inventory, its processes, and their state.

The modules here run Flower's own commands as processes and import neither Flower nor torch, except `node_app`,
which runs on a node and is loaded when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fl_elastic.lazy_names import loaded_late

if TYPE_CHECKING:
    from fl_elastic.flower.node_app import node_app

__all__ = ["node_app"]


__getattr__, __dir__ = loaded_late(__name__, {"node_app": "fl_elastic.flower.node_app"})
