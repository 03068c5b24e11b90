"""One client of a scenario, with its data, model, device and budget, in a simulation or on a real device."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.errors import ScenarioError, TrainingError
from fl_elastic.losses import classification_loss
from fl_elastic.planning import POLICIES
from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.memory import CODE_BYTES, mask_bytes
from fl_elastic.training import ForwardOptions, Timing, TrainablePart, TrainerOptions
from fl_elastic.update import CODECS
from fl_elastic_simulations.data.batches import Batches
from fl_elastic_simulations.engine.workload import (
    client_batches,
    optimizer_fn,
    scenario_model,
    test_batches,
)
from fl_elastic_simulations.scenario.scenario import Scenario
from fl_elastic_simulations.scenario.sections import MethodSection
from fl_elastic_simulations.unequal.fleet import Client
from fl_elastic_simulations.unequal.outcome import fits_memory

FEATURE_BYTES = 1 << 30
"""Most bytes of features that a simulated device keeps."""
PEAK_BYTES = "peak-bytes"
"""Metric of the predicted bytes of a step beyond weights and inference."""


@dataclass(frozen=True, eq=False)
class ClientSlot:
    """One client of a scenario in one round of one method.

    Parameters
    ----------
    scenario : Scenario
        The federation.
    method : MethodSection
        The method by which it is trained.
    client : Client
        The client, with its data, device and budget.
    seed, server_round : int
        Seed of the run, and number of the round.
    data_root : str, optional
        Folder of datasets.
    """

    scenario: Scenario
    method: MethodSection
    client: Client
    seed: int
    server_round: int
    data_root: str | None

    @classmethod
    def of(
        cls, scenario: Scenario, config: Mapping[str, Any], index: int, data_root: str | None
    ) -> ClientSlot:
        """Return the slot of the client with this index, for the scenario, method and round in a server's message.

        Raises
        ------
        ScenarioError
            If the scenario has no such client or method.
        """
        if index >= len(scenario.clients):
            raise ScenarioError(
                f"this node has partition {index}, the scenario has {len(scenario.clients)} clients"
            )
        return cls(
            scenario=scenario,
            method=scenario.method_named(str(config.get("method", ""))),
            client=scenario.clients[index],
            seed=int(config.get("seed", 0)),
            server_round=int(config.get("server-round", 0)),
            data_root=data_root,
        )

    def batches(self, *, whole: bool = False) -> Batches:
        """Return the round's training batches, or those of one whole pass over the client's data."""
        return client_batches(
            self.scenario,
            self.data_root,
            self.seed,
            self.client.index,
            self.server_round,
            whole=whole,
        )

    def test_batches(self) -> Batches:
        """Return the test batches, which are the same for all clients."""
        return test_batches(self.scenario, self.data_root)

    def model(self) -> nn.Module:
        """Return the model with the initial weights of the run."""
        return scenario_model(self.scenario, self.data_root, self.seed)

    def options(
        self, part: TrainablePart | None = None, timing: Timing | None = None
    ) -> TrainerOptions:
        """Return the method's training options, for the part of the model that the round trains."""
        part = part or TrainablePart()
        method = self.method
        return TrainerOptions(
            importance=method.importance,
            full_update_every=method.deep_every,
            forward=self._forward(bool(part.cut)),
            seed=(self.seed * 10_007 + self.client.index) * 100_003 + self.server_round,
            part=part,
            timing=timing or Timing(),
        )

    def _forward(self, cut: bool) -> ForwardOptions | None:
        """Return the options of the frozen prefix's forward pass."""
        if cut and self.method.keep_features:
            return ForwardOptions(feature_bytes=FEATURE_BYTES)
        return ForwardOptions() if cut else None

    def budget(
        self,
        full_round_seconds: float,
        model_bytes: float,
        *,
        speedup: float | None = None,
        deadline: float | None = None,
    ) -> Budget:
        """Return the budget of the client for a round.

        A speed-up applies to the whole round: the policy decides how much of it comes from cheaper steps and how
        much from fewer steps.

        Parameters
        ----------
        full_round_seconds : float
            Seconds in which the client could train everything.
        model_bytes : float
            Bytes of all weights as fp32.
        speedup, deadline : float, optional
            Limits of the device itself: the speed-up replaces the scenario's; if both limit the time, the shorter
            time applies.
        """
        method, client = self.method, self.client
        if not method.budgeted:
            return Budget()
        wanted = speedup or client.speedup
        limits = [] if deadline is None else [deadline]
        if wanted > 1:
            limits.append(full_round_seconds / wanted)
        share = client.uplink_share if POLICIES.make(method.policy).reduces_uplink else None
        written = CODECS.make(method.codec).share * model_bytes
        return Budget(
            deadline=min(limits, default=None),
            memory=client.memory_bytes,
            uplink=None if share is None else share * written,
        )

    def check_memory(self, profile: CostProfile, trained: Collection[str] | None = None) -> float:
        """Return the bytes of a plain step of these parameters, by default all; TrainingError if too many."""
        groups, limit = profile.graph.groups, self.client.memory_bytes
        mask = [trained is None or any(name in trained for name in g.parameters) for g in groups]
        # The process of a real device has not yet loaded the code for training.
        needed = mask_bytes(replace(profile, code_bytes=CODE_BYTES), np.array(mask))
        if limit is not None and not fits_memory(needed, limit):
            raise TrainingError(
                f"a step takes {needed / 1e6:.0f} MB, the device has {limit / 1e6:.0f} MB"
            )
        return needed

    def for_client(self) -> dict[str, Any]:
        """Return the arguments that every client of this slot has, whatever it trains on."""
        return {
            "policy": self.method.policy,
            "loss_fn": classification_loss,
            "optimizer_fn": optimizer_fn(self.scenario.training),
            "codec": self.method.codec,
            "device": self.client.device.name,
        }
