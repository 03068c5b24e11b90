"""The ClientApp of a simulation: each node plays the device that its partition number stands for."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fl_elastic.budget import Budget
from fl_elastic.errors import ElasticError, ProfileError, ScenarioError
from fl_elastic.flower.client import ElasticClient
from fl_elastic.flower.wire import ERROR, read_instruction, train_reply
from fl_elastic.losses import classification_loss
from fl_elastic.planning import make_policy
from fl_elastic.profiling import CostProfile, load_profile
from fl_elastic.simulation.scenario import Client, MethodSection, Scenario
from fl_elastic.simulation.workload import (
    client_batches,
    measure_profile,
    optimizer_fn,
    scenario_model,
    test_batches,
)
from fl_elastic.training import TrainerOptions

__all__ = ["simulated_client", "simulated_client_app"]


def simulated_client_app() -> ClientApp:
    """Return a ClientApp that reads what to simulate from the server's messages."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        arrays, config = read_instruction("train", message.content)
        try:
            client = simulated_client(config, _partition(context))
            packed, examples, metrics = client.fit(arrays, config)
        except ElasticError as error:
            packed, examples, metrics = [], 0, {ERROR: str(error)}
        metrics["client"] = _partition(context)
        return Message(train_reply(packed, examples, metrics), reply_to=message)

    return app


def _partition(context: Context) -> int:
    return int(context.node_config.get("partition-id", 0))


def simulated_client(config: dict[str, Any], index: int) -> ElasticClient:
    """Return the client with this index, as the scenario, method, seed and round in ``config`` say."""
    scenario = _scenario(str(config["scenario"]))
    if index >= len(scenario.clients):
        raise ScenarioError(
            f"this node has partition {index}, the scenario has {len(scenario.clients)} clients"
        )
    method, seed = _method(scenario, str(config["method"])), int(config["seed"])
    data_root = str(config.get("data-root", "")) or os.environ.get("FL_ELASTIC_DATA_ROOT")
    server_round = int(config["server-round"])
    batches = client_batches(scenario, data_root, seed, index, server_round)
    model = scenario_model(scenario, data_root, seed)
    profile = _profile(str(config.get("profile", ""))) or measure_profile(scenario, data_root)
    steps = len(batches) * scenario.training.local_epochs
    return ElasticClient(
        model,
        batches,
        test_batches(scenario, data_root),
        budget=_budget(
            scenario.clients[index],
            method,
            steps * profile.full_step_seconds,
            float(profile.parameter_bytes.sum()),
        ),
        policy=method.policy,
        loss_fn=classification_loss,
        optimizer_fn=optimizer_fn(scenario.training),
        epochs=scenario.training.local_epochs,
        codec=method.codec,
        options=TrainerOptions(
            importance=method.importance,
            closed_loop=False,
            seed=(seed * 10_007 + index) * 100_003 + server_round,
        ),
        profile=profile,
        state_dir=Path(str(config["state-dir"])) / method.name / str(seed) / str(index),
    )


@lru_cache(maxsize=4)
def _scenario(text: str) -> Scenario:
    return Scenario.from_json(text)


def _method(scenario: Scenario, name: str) -> MethodSection:
    return next(method for method in scenario.methods if method.name == name)


def _budget(client: Client, method: MethodSection, full_round: float, full_bytes: float) -> Budget:
    """Return the deadline and uplink that the scenario gives this device.

    The deadline makes the local training of a round ``speedup`` times faster than a full one; how much of that
    comes from cheaper steps and how much from fewer is the policy's choice.
    """
    if not method.budgeted:
        return Budget()
    share = client.uplink_share if make_policy(method.policy).selects else None
    return Budget(
        deadline=None if client.speedup <= 1 else full_round / client.speedup,
        uplink=None if share is None else share * full_bytes,
    )


@lru_cache(maxsize=4)
def _profile(path: str) -> CostProfile | None:
    """Return the profile that the server measured; on another machine the client measures its own."""
    try:
        return load_profile(path) if path else None
    except ProfileError:
        return None
