"""What a peer is given and gives back, the interface of peers, and their registry."""

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
from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.optimizers import OptimizerFn
from fl_elastic.registry import Factories
from fl_elastic.training.batches import loader_size
from fl_elastic.update import PartialUpdate

__all__ = [
    "PEERS",
    "LocalResult",
    "LocalTask",
    "Peer",
    "everything_fits",
    "first_batch",
    "num_examples",
    "register_peer",
    "requested_steps",
    "steps_in_time",
    "task_generator",
]


@dataclass(frozen=True, eq=False)
class LocalTask:
    """One client's local training in one round.

    Attributes
    ----------
    model : nn.Module
        With the global weights, as `Peer.prepare` returned it; trained in place.
    loss_fn : callable
        ``loss_fn(outputs, targets)`` returning a scalar tensor.
    optimizer_fn : callable
        ``optimizer_fn(parameters)`` returning a torch optimiser.
    batches : iterable of batch
        The client's data, which can be read again and again.
    epochs : int
        Passes over it that the round asks for.
    profile : CostProfile
        Costs of the whole model on the host.
    allowed_seconds : float
        Host seconds for the local training of this round; infinite where everybody is waited for.
    server_round : int
        Number of the round, from 1.
    base_version : int
        Version of the global model.
    clients, client : int
        Size of the fleet, and the client's place in it.
    seed : int
        Seed of the run.
    memory : dict
        The client's own notes from round to round, fit for JSON; read and written by the peer.
    global_change : dict of str to float
        Sum of squares of what has changed in each tensor of the global model since the client took part last;
        empty in its first round.
    fraction : float
        Speed of this device relative to the fastest.
    choosing_seconds : float
        Host seconds of one choice of what to train, see `Peer.rehearse`; `Peer.train` takes them off the allowed
        seconds where one is made.
    width : float, optional
        Share of the model's channels that the device trains, for peers of narrow models; the widest that fits the
        allowed time if left out.
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
    fraction: float = 1.0
    choosing_seconds: float = 0.0
    width: float | None = None

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
    """What one client's local training gave.

    Attributes
    ----------
    update : PartialUpdate
        Deltas against the weights that the task came with.
    host_seconds : float
        Predicted by costs measured on the host, which a virtual clock goes by.
    steps, requested_steps : int
        Steps taken, and steps of ``epochs`` passes over the data.
    step_seconds : float
        Median measured time of a step with a whole batch, 0 if there was none.
    loss : float
        Mean loss over the last pass.
    choosing_seconds : float
        Of the host seconds those of probes and of choosing.
    """

    update: PartialUpdate
    host_seconds: float
    steps: int
    requested_steps: int
    step_seconds: float
    loss: float
    choosing_seconds: float = 0.0


class Peer(ABC):
    """A published federated method, as far as a client carries it out.

    Attributes
    ----------
    name : str
        As registered.
    rule : str or AggregationRule
        Of its paper: a registered name, or an object without a state of its own.
    weighting : {"examples", "uniform"}
        Whether its paper weighs clients by their data.
    needs_costs : bool
        Whether a client must know what each tensor group costs, and so has to estimate that first.
    uses_change : bool
        Whether a client is told how far the global model has moved.
    """

    rule: ClassVar[str | AggregationRule] = "contributors"
    weighting: ClassVar[Literal["examples", "uniform"]] = "examples"
    needs_costs: ClassVar[bool] = False
    uses_change: ClassVar[bool] = False

    def __init__(self, name: str) -> None:
        self.name = name

    def prepare(self, model: nn.Module, loss_fn: LossFn, batch: Batch) -> nn.Module:
        """Return the model that server and clients train, the same for the same arguments.

        Tensors of the given model keep their names; more may be added. By default the model itself.
        """
        del loss_fn, batch
        return model

    def train(self, task: LocalTask) -> LocalResult:
        """Train in place and return the update; torch's random state is afterwards as before.

        Raises
        ------
        TrainingError
            If there is no data or a loss is not finite.
        ModelError
            If the method does not take such a model.
        BudgetError
            If the time does not pay for one step.
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
        """Work out what `local_training` would train, apart from probes; nothing is trained or kept.

        It is timed to know what choosing takes. By default there is nothing to choose.
        """
        del task

    @abstractmethod
    def local_training(self, task: LocalTask) -> LocalResult:
        """Train ``task.model`` in place; called by `train` with torch seeded for this client and round."""


def task_generator(task: LocalTask) -> np.random.Generator:
    """Return a source of randomness that depends on seed, client and round alone."""
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
    """Return the steps that the task's epochs ask for."""
    return loader_size(task.batches, first_batch(task)).batches * task.epochs


def num_examples(task: LocalTask) -> int:
    """Return how many examples the client has."""
    return loader_size(task.batches, first_batch(task)).examples


def everything_fits(task: LocalTask) -> bool:
    """Whether all steps of the whole model fit, which a client knows from the time of its steps alone."""
    if math.isinf(task.allowed_seconds):
        return True
    needed = requested_steps(task) * task.profile.full_step_seconds
    return needed <= task.allowed_seconds * (1 + 1e-9)


def steps_in_time(task: LocalTask, step_seconds: float, spent: float = 0.0) -> int:
    """Return how many of the task's steps fit its time once ``spent`` seconds of it are gone.

    Raises
    ------
    BudgetError
        If not even one does.
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
    """Return a class decorator that registers a peer with these settings under a name."""

    def register(peer: type[Peer]) -> type[Peer]:
        PEERS.register(name)(partial(peer, name, **settings))
        return peer

    return register
