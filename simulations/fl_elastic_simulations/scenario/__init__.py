"""The definition of a simulated federation: data, model, training, fleet and methods, in one TOML file."""

from __future__ import annotations

from fl_elastic_simulations.scenario.scenario import Scenario
from fl_elastic_simulations.unequal.fleet import Client

__all__ = ["Client", "Scenario"]
