"""Which client of the scenario a real device is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.errors import ScenarioError
from fl_elastic.flower.capabilities import Capabilities
from fl_elastic.flower.client import ElasticClient
from fl_elastic.flower.node_app import CaredFor, use_fastest_execution
from fl_elastic.flower.node_config import NodeConfig
from fl_elastic.flower.terms import DEADLINE
from fl_elastic.losses import classification_loss
from fl_elastic.planning import POLICIES
from fl_elastic.training import ForwardOptions, TrainerOptions
from fl_elastic.update import CODECS
from fl_elastic_simulations.data.batches import Batches
from fl_elastic_simulations.engine.workload import (
    client_batches,
    optimizer_fn,
    scenario_model,
    test_batches,
)
from fl_elastic_simulations.scenario.scenario import MethodSection, Scenario

__all__ = ["ScenarioNode"]


@dataclass(frozen=True)
class ScenarioNode:
    """A node in one message: which client of the scenario it is.

    Parameters
    ----------
    settings : NodeConfig
        How the node is set up.
    config : dict
        What the server says: scenario, method, seed and the round's instructions.
    """

    settings: NodeConfig
    config: dict[str, Any]

    def cared_for(self) -> CaredFor:
        """Return what answers the message."""
        return CaredFor(
            self.settings, self.config,
            lambda measure_again: self.client(measure_again=measure_again),
            case=str(self.config.get("method", "")),
        )  # fmt: skip

    def client(self, *, measure_again: bool = False) -> ElasticClient:
        """Return the client that this node is in the scenario.

        Parameters
        ----------
        measure_again : bool
            Whether kept costs are not used: heat or another load has changed what a step takes.

        Raises
        ------
        ScenarioError
            If the scenario has no such client or method.
        """
        scenario, settings = self._scenario(), self.settings
        method, seed = self._method(scenario), int(self.config.get("seed", 0))
        model = scenario_model(scenario, settings.data_root, seed)
        measured_on = self._batches(scenario, seed)
        use_fastest_execution(settings, model, classification_loss, measured_on)
        options = TrainerOptions(
            importance=method.importance,
            exploration=method.exploration,
            deep_every=method.deep_every,
            returns=method.returns,
            proximal=method.proximal,
            forward=ForwardOptions() if method.inference_prefix else None,
            # A deadline is elapsed time, also where one thread trains. A speed-up is a share of what a full
            # round costs by the measured profile, as in a simulation, whatever else the device does now.
            clock="wall",
            closed_loop=settings.deadline is not None or DEADLINE in self.config,
            seed=(seed * 10_007 + settings.partition) * 100_003
            + int(self.config.get("server-round", 0)),
        )
        common: dict[str, Any] = {
            "budget": Budget(deadline=settings.deadline) if method.budgeted else Budget(),
            "policy": method.policy,
            "loss_fn": classification_loss,
            "optimizer_fn": optimizer_fn(scenario.training),
            "codec": method.codec,
            "options": options,
            "device": scenario.clients[settings.partition].device.name,
            "state_dir": settings.state_dir / method.name / str(seed),
        }
        if settings.stream_dir is None:
            client = ElasticClient(
                model,
                measured_on,
                test_batches(scenario, settings.data_root),
                epochs=scenario.training.local_epochs,
                **common,
            )
        else:
            # What a node without a stream does not need is not loaded.
            from fl_elastic_simulations.fleet.stream_node import stream_client

            client = stream_client(settings, scenario.training, model, len(measured_on), common)
        if measure_again:
            client.forget_profile()
        # Its costs are measured here if they are not known.
        known = client.capabilities()
        if method.budgeted:
            client.budget = self._budget(known, scenario, method, model)
        if settings.stream_dir is None:
            # Training begins with its first order, whatever was measured before.
            client.train_loader = self._batches(scenario, seed)
        return client

    def _batches(self, scenario: Scenario, seed: int) -> Batches:
        settings, server_round = self.settings, int(self.config.get("server-round", 0))
        return client_batches(scenario, settings.data_root, seed, settings.partition, server_round)

    def _scenario(self) -> Scenario:
        scenario = Scenario.from_json(str(self.config.get("scenario", "")))
        if self.settings.partition >= len(scenario.clients):
            raise ScenarioError(
                f"this node has partition {self.settings.partition}, "
                f"the scenario has {len(scenario.clients)} clients"
            )
        return scenario

    def _method(self, scenario: Scenario) -> MethodSection:
        name = str(self.config.get("method", ""))
        found = [method for method in scenario.methods if method.name == name]
        if not found:
            known = ", ".join(method.name for method in scenario.methods)
            raise ScenarioError(f"the scenario has no method {name!r}: known are {known}")
        if found[0].peer is not None:
            raise ScenarioError(f"method {name!r} is a peer, which runs in simulations only")
        return found[0]

    def _budget(
        self, known: Capabilities, scenario: Scenario, method: MethodSection, model: nn.Module
    ) -> Budget:
        """Return what the node may spend: its own limits, or else those of its place in the scenario.

        A speed-up is that of the whole round, as in a simulation: how much of it comes from cheaper steps and how
        much from fewer is the policy's choice.
        """
        settings, place = self.settings, scenario.clients[self.settings.partition]
        speedup = settings.speedup or place.speedup
        limits = [] if settings.deadline is None else [settings.deadline]
        if speedup > 1:
            limits.append(known.steps * known.full_step_seconds / speedup)
        share = place.uplink_share if POLICIES.make(method.policy).selects else None
        written = CODECS.make(method.codec).share
        everything = sum(4.0 * written * each.numel() for each in model.parameters())
        return Budget(
            deadline=min(limits, default=None),
            uplink=None if share is None else share * everything,
        )
