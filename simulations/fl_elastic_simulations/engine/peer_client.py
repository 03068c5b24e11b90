"""A simulated client that trains by a published method."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fl_elastic.errors import BudgetError
from fl_elastic.flower.client_state import ClientState
from fl_elastic.flower.records import HAVE, MAY_TRAIN
from fl_elastic.flower.tasks.train import Train
from fl_elastic.losses import classification_loss
from fl_elastic.profiling import CostProfile
from fl_elastic.state.files import OWNER_ONLY, write_atomically
from fl_elastic.update import Manifest, encode, load_weights
from fl_elastic.update.model_store import ModelStore
from fl_elastic_simulations.data.batches import Batches
from fl_elastic_simulations.engine.client_slot import PEAK_BYTES
from fl_elastic_simulations.engine.workload import optimizer_fn
from fl_elastic_simulations.peers import PEERS, LocalTask
from fl_elastic_simulations.scenario.sections import TrainingSection

CHOOSING = "choosing-seconds"
"""Metric of the host seconds that probes and choices of a fit took."""

_LOG = logging.getLogger("fl_elastic")


@dataclass(frozen=True, eq=False)
class PeerClient:
    """One client of a published method in one round.

    Attributes
    ----------
    peer : str
        Name of the registered method.
    model : nn.Module
        The model, as prepared by the method.
    batches : Batches
        Local data.
    training : TrainingSection
        Optimiser and number of passes.
    profile : CostProfile
        Costs measured on the host.
    allowed_seconds : float
        Host seconds for local training and everything before it.
    profile_seconds, choosing_seconds : float
        Part of these seconds for estimating costs in this round, and for one choice of what to train.
    place : tuple of (int, int)
        The client's number, and the number of clients.
    seed : int
        Seed of the run.
    codec : str
        Codec of updates.
    state_directory : Path
        Folder of the method's state between rounds.
    check_memory : callable
        Returns the bytes of a step that trains these parameters; raises TrainingError if the device cannot hold
        them.
    """

    peer: str
    model: nn.Module
    batches: Batches
    training: TrainingSection
    profile: CostProfile
    allowed_seconds: float
    profile_seconds: float
    choosing_seconds: float
    place: tuple[int, int]
    seed: int
    codec: str
    state_directory: Path
    check_memory: Callable[[Collection[str]], float]

    def fit(
        self, parameters: list[NDArray[Any]], config: dict[str, Any]
    ) -> tuple[list[NDArray[Any]], int, dict[str, Any]]:
        """Load the global model, train with the method, and return the packed update with its costs."""
        if not self.allowed_seconds > self.profile_seconds:
            raise BudgetError(
                "sending, and estimating costs in a first round, take longer than the deadline: allow more time"
            )
        manifest = Manifest.of(self.model)
        asked = Train.from_config(config)
        state = ClientState(self.state_directory, manifest)
        weights, version = state.received(parameters[0].tobytes(), self.model)
        said: dict[str, Any] = {}
        if asked.keep and state.keep_model(weights, version):
            said[HAVE] = version
        if asked.kept_head:
            # A published method also trains the head that was solved in closed form.
            said[MAY_TRAIN] = json.dumps(list(range(len(manifest))))
        load_weights(self.model, manifest, weights)
        memory = self._memory()
        task = LocalTask(
            model=self.model,
            loss_fn=classification_loss,
            optimizer_fn=optimizer_fn(self.training),
            batches=self.batches,
            epochs=self.training.local_epochs,
            profile=self.profile,
            allowed_seconds=self.allowed_seconds - self.profile_seconds,
            server_round=int(config["server-round"]),
            base_version=version,
            clients=self.place[1],
            client=self.place[0],
            seed=self.seed,
            memory=memory,
            global_change=self._change(weights, version, manifest),
            choosing_seconds=self.choosing_seconds,
        )
        try:
            result = PEERS.make(self.peer).train(task)
        finally:
            # Saved even if the client skips the round: the method may choose differently in the next one.
            write_atomically(
                self._memory_file, json.dumps(memory).encode(), OWNER_ONLY, durable=False
            )
        peak = self.check_memory(result.update.deltas.keys())
        packed = encode(result.update, manifest, self.codec)
        metrics = {
            "train-loss": float(result.loss),
            "steps": int(result.steps),
            "requested-steps": int(result.requested_steps),
            "step-seconds": float(result.step_seconds),
            "full-step-seconds": float(self.profile.full_step_seconds),
            "predicted-seconds": float(result.host_seconds + self.profile_seconds),
            CHOOSING: float(result.choosing_seconds),
            PEAK_BYTES: peak,
            **said,
        }
        return [np.frombuffer(packed, dtype=np.uint8)], result.update.num_examples, metrics

    @property
    def _memory_file(self) -> Path:
        return self.state_directory / "memory.json"

    def _memory(self) -> dict[str, Any]:
        try:
            found = json.loads(self._memory_file.read_text())
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def _change(
        self, weights: dict[str, NDArray[Any]], version: int, manifest: Manifest
    ) -> dict[str, float]:
        """Return the squared change of each global tensor since this client last took part, and save the model."""
        if not PEERS.make(self.peer).uses_change:
            return {}
        store = ModelStore(self.state_directory / "before.bin")
        before = store.load(manifest)
        store.save(weights, version)
        if before is None:
            return {}
        return {
            name: float(np.square(np.asarray(weights[name], np.float64) - old).sum())
            for name, old in before[0].items()
            if old.dtype.kind == "f"
        }
