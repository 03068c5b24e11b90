"""What choosing takes in a test: so much for every method and device."""

from __future__ import annotations

from fl_elastic_simulations.engine.choosing import ChoosingCosts
from fl_elastic_simulations.engine.head_costs import HeadCosts
from fl_elastic_simulations.scenario import Scenario


def flat_choosing(
    made: Scenario, profile: float = 0.0, plan: float = 0.0, head: HeadCosts | None = None
) -> ChoosingCosts:
    """The same seconds for every method and class of devices, none by default."""
    devices = {client.device.name: plan for client in made.clients}
    plans = {method.name: devices for method in made.methods}
    return ChoosingCosts(profile, plans, head_seconds=head or HeadCosts())
