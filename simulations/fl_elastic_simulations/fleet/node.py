"""A real device of a fleet: its settings, its client of the scenario, and how it is doing."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray
from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.devices.platform import processors
from fl_elastic.devices.power import power_supply
from fl_elastic.devices.vitals import Vitals
from fl_elastic.errors import FleetError, ScenarioError
from fl_elastic.flower.capabilities import Capabilities
from fl_elastic.flower.client import ElasticClient
from fl_elastic.flower.terms import DEADLINE
from fl_elastic.flower.wire import evaluate_reply, train_reply
from fl_elastic.groups import Batch
from fl_elastic.losses import classification_loss
from fl_elastic.operations import Journal, log_to_file, read_journal
from fl_elastic.planning import make_policy
from fl_elastic.profiling.execution import (
    Execution,
    load_or_measure_execution,
    measure_execution,
)
from fl_elastic.profiling.measure import profile_key
from fl_elastic.training import ForwardOptions, TrainerOptions
from fl_elastic.update import make_codec
from fl_elastic_simulations.data.batches import Batches
from fl_elastic_simulations.engine.workload import (
    client_batches,
    optimizer_fn,
    scenario_model,
    test_batches,
)
from fl_elastic_simulations.fleet.settings import NodeSettings
from fl_elastic_simulations.scenario.scenario import MethodSection, Scenario

__all__ = ["FleetNode"]

JOURNAL = "metrics.jsonl"
"""In a node's state folder: a line per round that it took part in."""

_LOG_FILE = "node.log"
_EXECUTION_FILE = "execution.json"
_LEAST_SECONDS = 1e-3
# Measured over predicted step time that is no noise any more, in so many rounds after each other.
_DRIFT, _DRIFT_ROUNDS = 1.5, 3
_LOG = logging.getLogger("fl_elastic")


@dataclass(frozen=True)
class FleetNode:
    """A node in one round: trains or evaluates its client of the scenario and answers.

    Parameters
    ----------
    settings : NodeSettings
        Its own.
    config : dict
        What the server says: scenario, method, seed and the round's instructions.
    """

    settings: NodeSettings
    config: dict[str, Any]

    def train(self, arrays: list[NDArray[Any]]) -> Any:
        """Return the reply to a training message; a line about it goes into the node's journal."""
        log_to_file(self.settings.state_dir / _LOG_FILE)
        started, vitals = time.monotonic(), Vitals(self.settings.state_dir)
        refusal = self.settings.refusal(power_supply())
        if refusal:
            raise FleetError(f"takes no part in this round: {refusal}")
        again = self._has_drifted(self._method(self._scenario()))
        client = self.client(measure_again=again)
        packed, examples, metrics = client.fit(arrays, self._time_left(started))
        metrics |= vitals.metrics()
        metrics["message-seconds"] = time.monotonic() - started
        if client.report is not None:
            metrics["drift"] = client.report.drift
        entry = {
            key.replace("-", "_"): value
            for key, value in metrics.items()
            if isinstance(value, (int, float))
        }
        self._journal.append(
            {
                **entry,
                "method": str(self.config.get("method", "")),
                "measured_again": again,
                "round": int(self.config.get("server-round", 0)),
                "time": time.time(),
            }
        )
        return train_reply(packed, examples, metrics)

    @property
    def _journal(self) -> Journal:
        return Journal(self.settings.state_dir / JOURNAL)

    def _time_left(self, started: float) -> dict[str, Any]:
        """Return what the server says, with the time that loading took already out of its deadline."""
        deadline = self.config.get(DEADLINE)
        if deadline is None:
            return self.config
        return self.config | {
            DEADLINE: max(deadline - (time.monotonic() - started), _LEAST_SECONDS)
        }

    def evaluate(self, arrays: list[NDArray[Any]]) -> Any:
        """Return the reply to an evaluation message, or to the question what the device can do."""
        log_to_file(self.settings.state_dir / _LOG_FILE)
        return evaluate_reply(*self.client().evaluate(arrays, self.config))

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
        self._execution(model, next(iter(measured_on))).apply(model)
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
            _LOG.info("steps take another time than was measured: measuring again")
            client.forget_profile()
        # Its costs are measured here if they are not known.
        known = client.capabilities()
        if method.budgeted:
            client.budget = self._budget(known, scenario, method, model)
        if settings.stream_dir is None:
            # Training begins with its first order, whatever was measured before.
            client.train_loader = self._batches(scenario, seed)
        return client

    def _has_drifted(self, method: MethodSection) -> bool:
        """Whether all rounds since the last measurement, at least three, ran slower or faster than it says."""
        ratios: list[float] = []
        for entry in reversed(read_journal(self._journal.path)):
            if entry.get("method") != method.name or len(ratios) == _DRIFT_ROUNDS:
                break
            ratios.append(float(entry.get("drift") or 1.0))
            if entry.get("measured_again"):
                break
        if len(ratios) < _DRIFT_ROUNDS:
            return False
        return all(each > _DRIFT for each in ratios) or all(each < 1 / _DRIFT for each in ratios)

    def _batches(self, scenario: Scenario, seed: int) -> Batches:
        settings, server_round = self.settings, int(self.config.get("server-round", 0))
        return client_batches(scenario, settings.data_root, seed, settings.partition, server_round)

    def _execution(self, model: nn.Module, batch: Batch) -> Execution:
        """Return threads and memory format: what the node says, or else what was fastest when first measured."""
        settings, most = self.settings, processors().threads
        if settings.threads:
            return Execution(settings.threads)
        key = profile_key(model, batch)
        case = f"{key.model} {key.batch_shape} {most} {key.device} {key.torch_version}"
        return load_or_measure_execution(
            settings.state_dir / _EXECUTION_FILE,
            case,
            lambda: measure_execution(model, classification_loss, batch, most_threads=most),
        )

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
        share = place.uplink_share if make_policy(method.policy).selects else None
        written = make_codec(method.codec).share
        everything = sum(4.0 * written * each.numel() for each in model.parameters())
        return Budget(
            deadline=min(limits, default=None),
            uplink=None if share is None else share * everything,
        )
