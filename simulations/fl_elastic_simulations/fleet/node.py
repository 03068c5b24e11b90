"""The client of the scenario that a real device stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fl_elastic.budget import Budget
from fl_elastic.errors import ScenarioError
from fl_elastic.flower.client import ElasticClient
from fl_elastic.flower.node_app import NodeMessage, use_fastest_execution
from fl_elastic.flower.node_config import NodeConfig
from fl_elastic.flower.tasks.task import DEADLINE
from fl_elastic.losses import classification_loss
from fl_elastic.training import Timing
from fl_elastic_simulations.engine.client_slot import ClientSlot
from fl_elastic_simulations.scenario.scenario import Scenario


@dataclass(frozen=True)
class ScenarioNode:
    """A node handling one message, as a client of the scenario.

    Parameters
    ----------
    settings : NodeConfig
        Settings of the node.
    config : dict
        Config from the server: scenario, method, seed and the round's instructions.
    """

    settings: NodeConfig
    config: dict[str, Any]

    def message(self) -> NodeMessage:
        """Return the object that answers the message."""
        return NodeMessage(
            self.settings, self.config,
            lambda measure_again: self.client(measure_again=measure_again),
            case=str(self.config.get("method", "")),
        )  # fmt: skip

    def client(self, *, measure_again: bool = False) -> ElasticClient:
        """Return this node's client of the scenario.

        Parameters
        ----------
        measure_again : bool
            Whether to measure costs again instead of using kept ones, since heat or load has changed the time of a
            step.

        Raises
        ------
        ScenarioError
            If the scenario has no such client or method.
        """
        settings = self.settings
        scenario = Scenario.from_json(str(self.config.get("scenario", "")))
        slot = ClientSlot.of(scenario, self.config, settings.partition, settings.data_root)
        method = slot.method
        if method.peer is not None:
            raise ScenarioError(f"method {method.name!r} is a peer, which runs in simulations only")
        model, measured_on = slot.model(), slot.batches()
        use_fastest_execution(settings, model, classification_loss, measured_on)
        common: dict[str, Any] = {
            **slot.for_client(),
            "budget": Budget(deadline=settings.deadline, memory=slot.client.memory_bytes)
            if method.budgeted
            else Budget(),
            # A deadline is elapsed time, even if one thread trains. A speed-up is a share of the measured cost of a
            # full round, as in a simulation, whatever else the device is doing.
            "options": slot.options(
                timing=Timing(
                    clock="wall",
                    closed_loop=settings.deadline is not None or DEADLINE in self.config,
                ),
            ),
            "state_dir": settings.state_dir / method.name / str(slot.seed),
        }
        if settings.stream_dir is None:
            client = ElasticClient(
                model,
                measured_on,
                slot.test_batches(),
                epochs=scenario.training.local_epochs,
                **common,
            )
        else:
            # Imported here: a node without a stream does not need it.
            from fl_elastic_simulations.fleet.stream_node import stream_client

            client = stream_client(settings, scenario.training, model, len(measured_on), common)
        if measure_again:
            client.forget_profile()
        # This measures the client's costs if they are not known.
        known = client.capabilities()
        client.budget = slot.budget(
            known.steps * known.full_step_seconds,
            sum(4.0 * each.numel() for each in model.parameters()),
            speedup=settings.speedup,
            deadline=settings.deadline,
        )
        if settings.stream_dir is None:
            # Training must begin with the first order of batches, whatever was measured before.
            client.train_loader = slot.batches()
        return client
