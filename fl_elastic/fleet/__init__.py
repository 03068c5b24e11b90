"""A fleet of real devices: its keys and inventory, its processes, and what state it is in.

Everything here drives Flower's own commands as processes; nothing imports Flower or torch.
"""

from __future__ import annotations

from fl_elastic.fleet.inventory import Inventory, Node, Server, load_inventory
from fl_elastic.fleet.layout import FleetFolder, NodeFolder

__all__ = ["FleetFolder", "Inventory", "Node", "NodeFolder", "Server", "load_inventory"]
