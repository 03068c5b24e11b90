"""The model of a method: the scenario's, to which some peers add parts."""

from __future__ import annotations

from torch import nn

from fl_elastic.losses import classification_loss
from fl_elastic_simulations.engine.workload import (
    first_batch,
    scenario_dataset,
    scenario_model,
)
from fl_elastic_simulations.peers import PEERS
from fl_elastic_simulations.scenario.scenario import Scenario
from fl_elastic_simulations.scenario.sections import MethodSection


def read_at(model: nn.Module, read: str, scenario: Scenario, data_root: str | None) -> nn.Module:
    """Return a readout of a scenario's model at these places; the model itself if there are none."""
    if not read:
        return model
    # The dataset is only needed for the few methods that read elsewhere.
    from fl_elastic.readout.readout_module import Readout

    classes = scenario_dataset(scenario, data_root).classes
    return Readout(model, read, first_batch(scenario, data_root)[0], classes)


def method_model(
    scenario: Scenario,
    method: MethodSection,
    data_root: str | None,
    seed: int,
    read: str = "",
) -> nn.Module:
    """Return the model of a method: some peers add early exits to the scenario's.

    Parameters
    ----------
    scenario, method, data_root, seed
        Determine the model and its initial weights.
    read : str
        Places that its head reads; empty for the plain model.
    """
    model = read_at(scenario_model(scenario, data_root, seed), read, scenario, data_root)
    if method.peer is None:
        return model
    return PEERS.make(method.peer).prepare(
        model, classification_loss, first_batch(scenario, data_root)
    )
