"""Which method of a scenario a real fleet runs."""

from __future__ import annotations

from fl_elastic.errors import ScenarioError
from fl_elastic.planning import POLICIES
from fl_elastic_simulations.engine.methods import check_methods
from fl_elastic_simulations.scenario.scenario import Scenario
from fl_elastic_simulations.scenario.sections import MethodSection


def fleet_method(scenario: Scenario, name: str) -> MethodSection:
    """Return the method with this name; without a name, the first that selects what to train, or else the first.

    Raises
    ------
    ScenarioError
        If a method is invalid, or a fleet cannot run any of this name: those of peers run in simulations alone.
    """
    check_methods(scenario)
    own = [method for method in scenario.methods if method.peer is None]
    selecting = [method for method in own if POLICIES.make(method.policy).reduces_uplink]
    if not name:
        found = (selecting or own)[:1]
    else:
        found = [method for method in own if method.name == name]
    if not found:
        known = ", ".join(method.name for method in own)
        raise ScenarioError(f"no method {name!r} that a real fleet can run: known are {known}")
    return found[0]
