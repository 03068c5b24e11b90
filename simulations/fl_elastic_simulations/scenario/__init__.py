"""What is trained, by whom and how: one file in TOML."""

from __future__ import annotations

from fl_elastic_simulations.scenario.scenario import Client, Scenario

__all__ = ["Client", "Scenario"]
