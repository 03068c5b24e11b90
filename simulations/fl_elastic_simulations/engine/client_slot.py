"""One client of a scenario: its data, model, device and budget, in a simulation and on a real device."""

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
from fl_elastic.profiling.code_bytes import CODE_BYTES
from fl_elastic.profiling.memory import mask_bytes
from fl_elastic.training import ForwardOptions, Timing, TrainablePart, TrainerOptions
from fl_elastic.update import CODECS
from fl_elastic_simulations.data.batches import Batches
from fl_elastic_simulations.engine.workload import (
    client_batches,
    optimizer_fn,
    scenario_model,
    test_batches,
)
from fl_elastic_simulations.scenario.scenario import Client, MethodSection, Scenario
from fl_elastic_simulations.unequal.clock import fits_memory

__all__ = ["FEATURE_BYTES", "PEAK_BYTES", "ClientSlot"]

FEATURE_BYTES = 1 << 30
"""What a simulated device keeps of features at the most."""
PEAK_BYTES = "peak-bytes"
"""The metric of what a step takes beyond the weights and inference, as predicted."""


@dataclass(frozen=True, eq=False)
class ClientSlot:
    """Which client of which scenario somebody is in one round of one method.

    Parameters
    ----------
    scenario : Scenario
        The federation.
    method : MethodSection
        How it is trained.
    client : Client
        Whose data, device and budget these are.
    seed, server_round : int
        Of the run, and its round.
    data_root : str, optional
        Where datasets are.
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
        """Return the place that a server's message gives to the client with this index.

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
        """Return the batches that everybody tests on."""
        return test_batches(self.scenario, self.data_root)

    def model(self) -> nn.Module:
        """Return the model with the first weights of the run."""
        return scenario_model(self.scenario, self.data_root, self.seed)

    def options(
        self, part: TrainablePart | None = None, timing: Timing | None = None
    ) -> TrainerOptions:
        """Return what the method says of training, of what the round leaves to train."""
        part = part or TrainablePart()
        method = self.method
        return TrainerOptions(
            importance=method.importance,
            full_update_every=method.deep_every,
            proximal=method.proximal,
            forward=self._forward(bool(part.cut)),
            seed=(self.seed * 10_007 + self.client.index) * 100_003 + self.server_round,
            part=part,
            timing=timing or Timing(),
        )

    def _forward(self, cut: bool) -> ForwardOptions | None:
        """Return how the frozen prefix runs."""
        if cut and self.method.keep_features:
            return ForwardOptions(feature_bytes=FEATURE_BYTES)
        return ForwardOptions() if cut or self.method.inference_prefix else None

    def budget(
        self,
        full_round_seconds: float,
        model_bytes: float,
        *,
        speedup: float | None = None,
        deadline: float | None = None,
    ) -> Budget:
        """Return what the client may spend in a round.

        A speed-up is that of the whole round: how much of it comes from cheaper steps and how much from fewer is
        the policy's choice.

        Parameters
        ----------
        full_round_seconds : float
            Time in which it could train everything.
        model_bytes : float
            Of all weights as fp32.
        speedup, deadline : float, optional
            The device's own limits: the speed-up stands in place of the scenario's, and of two times the shorter
            one holds.
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
        """Return what a plain step of these parameters takes, or of all; TrainingError if that does not fit."""
        groups, limit = profile.graph.groups, self.client.memory_bytes
        mask = [trained is None or any(name in trained for name in g.parameters) for g in groups]
        # The process of a real device has yet to load what training takes.
        needed = mask_bytes(replace(profile, code_bytes=CODE_BYTES), np.array(mask))
        if limit is not None and not fits_memory(needed, limit):
            raise TrainingError(
                f"a step takes {needed / 1e6:.0f} MB, the device has {limit / 1e6:.0f} MB"
            )
        return needed

    def for_client(self) -> dict[str, Any]:
        """Return the arguments that any client of this place has, whatever it trains on."""
        return {
            "policy": self.method.policy,
            "loss_fn": classification_loss,
            "optimizer_fn": optimizer_fn(self.scenario.training),
            "codec": self.method.codec,
            "device": self.client.device.name,
        }
