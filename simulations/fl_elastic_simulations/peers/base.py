"""The interface of peers (published rival methods), their task and result, and their registry."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import nn

from fl_elastic.aggregation import AggregationRule
from fl_elastic.errors import BudgetError, TrainingError
from fl_elastic.groups import Batch, LossFn
from fl_elastic.groups.untouched import preserved_rng
from fl_elastic.optimizers import OptimizerFn
from fl_elastic.profiling import CostProfile
from fl_elastic.registry import Factories
from fl_elastic.training.loader import loader_size
from fl_elastic.update import PartialUpdate


@dataclass(frozen=True, eq=False)
class LocalTask:
    """One client's local training in one round.

    Attributes
    ----------
    model : nn.Module
        The model as returned by `Peer.prepare`, with the global weights; trained in place.
    loss_fn : callable
        ``loss_fn(outputs, targets)`` returns a scalar tensor.
    optimizer_fn : callable
        ``optimizer_fn(parameters)`` returns a torch optimiser.
    batches : iterable of batch
        The client's data, which can be iterated any number of times.
    epochs : int
        Number of passes over the data that the round asks for.
    profile : CostProfile
        Costs of the whole model on the host.
    allowed_seconds : float
        Host seconds for the local training of this round; infinite if the server waits for all clients.
    server_round : int
        Number of the round, from 1.
    base_version : int
        Version of the global model.
    clients, client : int
        Size of the fleet, and the client's number in it.
    seed : int
        Seed of the run.
    memory : dict
        The client's own state between rounds, as JSON can hold it; read and written by the peer.
    global_change : dict of str to float
        Sum of squared changes of each tensor of the global model since the client last took part; empty in its
        first round.
    choosing_seconds : float
        Host seconds of one choice of what to train, see `Peer.rehearse`; `Peer.train` subtracts them from the
        allowed seconds if a choice is made.
    """

    model: nn.Module
    loss_fn: LossFn
    optimizer_fn: OptimizerFn
    batches: Iterable[Batch]
    epochs: int
    profile: CostProfile
    allowed_seconds: float
    server_round: int
    base_version: int
    clients: int
    client: int
    seed: int
    memory: dict[str, Any] = field(default_factory=dict)
    global_change: dict[str, float] = field(default_factory=dict)
    choosing_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("epochs", "server_round", "clients"):
            if getattr(self, name) < 1:
                raise TrainingError(f"{name} {getattr(self, name)} must be at least 1")
        if not self.allowed_seconds > 0:
            raise TrainingError(
                f"allowed_seconds {self.allowed_seconds} must be positive; use infinity for no limit"
            )


@dataclass(frozen=True, eq=False)
class LocalResult:
    """Result of one client's local training.

    Attributes
    ----------
    update : PartialUpdate
        Update relative to the weights of the task's model.
    host_seconds : float
        Seconds predicted from costs measured on the host, for the simulated clock.
    steps, requested_steps : int
        Steps taken, and steps of ``epochs`` passes over the data.
    step_seconds : float
        Median measured time of a step with a whole batch; 0 if there was none.
    loss : float
        Mean loss over the last pass.
    choosing_seconds : float
        Part of the host seconds for probes and for choosing.
    """

    update: PartialUpdate
    host_seconds: float
    steps: int
    requested_steps: int
    step_seconds: float
    loss: float
    choosing_seconds: float = 0.0


class Peer(ABC):
    """A published federated method, as far as clients carry it out.

    Attributes
    ----------
    name : str
        Name under which it is registered.
    rule : str or AggregationRule
        Aggregation rule of its paper: a registered name, or an object without state.
    weighting : {"examples", "uniform"}
        Whether its paper weights clients by their number of examples or equally.
    needs_costs : bool
        Whether a client needs the costs of each tensor group, and therefore has to estimate them first.
    uses_change : bool
        Whether a client is told how much the global model has changed.
    """

    rule: ClassVar[str | AggregationRule] = "contributors"
    weighting: ClassVar[Literal["examples", "uniform"]] = "examples"
    needs_costs: ClassVar[bool] = False
    uses_change: ClassVar[bool] = False

    def __init__(self, name: str) -> None:
        self.name = name

    def prepare(self, model: nn.Module, loss_fn: LossFn, batch: Batch) -> nn.Module:
        """Return the model that server and clients train; it is the same for the same arguments.

        Tensors of the given model keep their names; further ones may be added. By default it is the model itself.
        """
        del loss_fn, batch
        return model

    def train(self, task: LocalTask) -> LocalResult:
        """Train in place and return the result; torch's random state is unchanged afterwards.

        Raises
        ------
        TrainingError
            If there is no data or a loss is not finite.
        ModelError
            If the method does not support such a model.
        BudgetError
            If the time does not suffice for one step.
        """
        choosing = task.choosing_seconds if self.needs_costs and not everything_fits(task) else 0.0
        if choosing >= task.allowed_seconds:
            raise BudgetError(
                f"choosing takes {choosing:.3g} s of the {task.allowed_seconds:.3g} s that are allowed"
            )
        task = replace(task, allowed_seconds=task.allowed_seconds - choosing)
        task.model.train()
        with preserved_rng():
            torch.manual_seed(int(task_generator(task).integers(2**63)))
            result = self.local_training(task)
        return replace(
            result,
            host_seconds=result.host_seconds + choosing,
            choosing_seconds=result.choosing_seconds + choosing,
        )

    def rehearse(self, task: LocalTask) -> None:
        """Compute the choice of `local_training` without probes; nothing is trained or stored.

        It is timed in order to know the cost of choosing. By default there is nothing to choose.
        """
        del task

    @abstractmethod
    def local_training(self, task: LocalTask) -> LocalResult:
        """Train ``task.model`` in place; called by `train` with torch seeded for this client and round."""


def task_generator(task: LocalTask) -> np.random.Generator:
    """Return a random generator that depends only on seed, client and round."""
    return np.random.default_rng([task.seed, task.client, task.server_round])


def first_batch(task: LocalTask) -> Any:
    """Return the client's first batch.

    Raises
    ------
    TrainingError
        If there is none.
    """
    batch = next(islice(iter(task.batches), 1), None)
    if batch is None:
        raise TrainingError("the loader gave no batch: check the client's data and batch size")
    return batch


def requested_steps(task: LocalTask) -> int:
    """Return the number of steps of the task's epochs."""
    return loader_size(task.batches, first_batch(task)).batches * task.epochs


def num_examples(task: LocalTask) -> int:
    """Return the client's number of examples."""
    return loader_size(task.batches, first_batch(task)).examples


def everything_fits(task: LocalTask) -> bool:
    """Return whether all steps of the whole model fit; a client knows this from the time of its steps alone."""
    if math.isinf(task.allowed_seconds):
        return True
    needed = requested_steps(task) * task.profile.full_step_seconds
    return needed <= task.allowed_seconds * (1 + 1e-9)


def steps_in_time(task: LocalTask, step_seconds: float, spent: float = 0.0) -> int:
    """Return how many of the task's steps fit its time after ``spent`` seconds of it are used.

    Raises
    ------
    BudgetError
        If not even one step fits.
    """
    requested = requested_steps(task)
    if math.isinf(task.allowed_seconds):
        return requested
    left = task.allowed_seconds - spent
    steps = min(requested, math.floor(left / step_seconds + 1e-9))
    if steps < 1:
        raise BudgetError(
            f"{max(left, 0.0):.3g} s do not pay for one step of {step_seconds:.3g} s: allow more time, or leave "
            "this device out of the round"
        )
    return steps


PEERS: Factories[Peer] = Factories("peer")
"""Peers by name."""


def register_peer(name: str, **settings: Any) -> Callable[[type[Peer]], type[Peer]]:
    """Return a class decorator that registers a peer under a name, with these settings."""

    def register(peer: type[Peer]) -> type[Peer]:
        PEERS.register(name)(partial(peer, name, **settings))
        return peer

    return register
