"""What a client works on for one message: a model with the server's weights, batches for it, and settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from numpy.typing import NDArray
from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.flower.tasks.task import RoundTask
from fl_elastic.flower.tasks.train import Train
from fl_elastic.groups import Batch, LossFn
from fl_elastic.losses import squared_outputs
from fl_elastic.profiling.optimizers import OptimizerFn
from fl_elastic.training import ElasticTrainer, FitReport, TrainablePart, TrainerOptions
from fl_elastic.update import Manifest, PartialUpdate, weights_of

if TYPE_CHECKING:
    from fl_elastic.update.head_sums import HeadSums
    from fl_elastic.update.squared_gradients import SquaredGradients

    Squares: TypeAlias = tuple[SquaredGradients, SquaredGradients | None]


Configure = Callable[[torch.optim.Optimizer, dict[str, Any]], object]


@dataclass(frozen=True, eq=False)
class RoundData:
    """Data of a client's loaders; for samples of a stream see `fl_elastic.flower.stream_data.StreamData`.

    Attributes
    ----------
    manifest : Manifest
        Manifest of the server's model.
    model : nn.Module
        The model that is trained and evaluated.
    batches, tests : iterable of batches
        Training and test data.
    loss_fn : callable
        Loss of ``batches``.
    """

    manifest: Manifest
    model: nn.Module
    batches: Iterable[Batch]
    tests: Iterable[Batch]
    loss_fn: LossFn

    keeps_features: ClassVar[bool] = False
    """Whether the batches are features already, so that no frozen prefix runs."""
    one_pass: ClassVar[bool] = False
    """Whether a second pass over the batches would draw the same samples."""

    def examples(self, *, of_server: bool = False) -> Iterable[Batch]:
        """Return batches that hold each example once; ``of_server`` restricts them to the server's classes."""
        return self.batches

    def weights(self) -> dict[str, NDArray[Any]]:
        """Return the weights of the model in the server's form."""
        return weights_of(self.model, self.manifest, self.manifest.names)

    def update(self, trainer: ElasticTrainer, version: int) -> PartialUpdate:
        """Return the update of a fit that started from this version of the server's model."""
        return trainer.update(version)

    def known_sums(self) -> HeadSums | None:
        """Return the sums for a head in closed form if they are known without a pass over the examples."""
        return None

    def in_server_order(self, sums: HeadSums) -> HeadSums:
        """Return the sums over `examples` of the server's classes, arranged by the server's outputs."""
        return sums

    def squares(self, compute: Callable[[LossFn], Squares]) -> Squares:
        """Return squared gradients by the server's outputs; ``compute`` computes them for a loss."""
        return compute(squared_outputs)

    def finish(self, task: RoundTask, report: FitReport | None) -> dict[str, Any]:
        """Pass on the result of a successful task; return further metrics for the server."""
        return {}


def round_budget(budget: Budget, task: RoundTask, share: float) -> Budget:
    """Return the budget of a round: with the server's deadline, unless the device's own is earlier.

    Parameters
    ----------
    budget : Budget
        The device's budget.
    task : RoundTask
        Has the server's deadline.
    share : float
        Bytes of an update as the codec writes it over its bytes in fp32, in which plans count: bandwidth and uplink
        bytes are divided by it.

    Examples
    --------
    >>> from fl_elastic import Budget
    >>> round_budget(Budget(deadline=20.0, uplink=1e6), Train(deadline=10.0), share=0.25)
    Budget(speedup=None, deadline=10.0, memory=None, uplink=4000000.0, bandwidth=None)
    """
    limits = [each for each in (budget.deadline, task.deadline) if each is not None]
    bandwidth, uplink = (
        None if each is None else each / share for each in (budget.bandwidth, budget.uplink)
    )
    return replace(budget, deadline=min(limits, default=None), bandwidth=bandwidth, uplink=uplink)


def round_options(options: TrainerOptions, task: RoundTask) -> TrainerOptions:
    """Return a client's options with what the task says about the round; the seed is the client's own."""
    training, own = task if isinstance(task, Train) else Train(), options.part
    part = TrainablePart(
        cut=task.cut or own.cut,
        kept_head=task.kept_head or own.kept_head,
        keep_statistics=training.keep_statistics or own.keep_statistics,
    )
    # If the server chooses the groups, everything is trained only when it says so.
    every = 0 if training.groups else options.full_update_every
    return replace(options, part=part, full_update_every=every)


def round_optimizer(
    optimizer_fn: OptimizerFn,
    task: Train,
    config: Mapping[str, Any],
    configure: Configure | None,
) -> OptimizerFn:
    """Return a function that makes the client's optimiser with the server's settings.

    Parameters
    ----------
    optimizer_fn : callable
        Makes the client's optimiser.
    task : Train
        Has the learning rate, or a factor of it.
    config : mapping
        Config of the message, for ``configure``.
    configure : callable, optional
        ``configure(optimizer, config)`` applies further settings, after the rate is set and before its factor.
    """
    if configure is None and task.rate == 1.0 and task.lr is None:
        return optimizer_fn

    # Keeps the signature, by which names of parameters are passed or not.
    @wraps(optimizer_fn)
    def made(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = optimizer_fn(parameters)
        usual = optimizer.defaults.get("lr") if isinstance(optimizer, torch.optim.Optimizer) else 0
        for group in optimizer.param_groups if task.lr is not None and usual else ():
            group["lr"] = task.lr * (group["lr"] / usual)
        if configure is not None:
            configure(optimizer, dict(config))
        for group in optimizer.param_groups if task.rate != 1.0 else ():
            if "lr" in group:
                group["lr"] = task.rate * group["lr"]
        return optimizer

    return made
