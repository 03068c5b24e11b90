"""Profile, score and plan one model on random data, for the command line and benchmarks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.errors import ModelError
from fl_elastic.groups import Batch
from fl_elastic.importance import Probe, make_importance
from fl_elastic.losses import classification_loss
from fl_elastic.planning import Plan, PlanRequest, make_policy
from fl_elastic.profiling import CostProfile, load_or_measure, profile_model
from fl_elastic.profiling.measure import profile_key
from fl_elastic.training import SelectionState, TrainerOptions
from fl_elastic.training.measured import MeasuredPlan, measure_plan, plan_measured

__all__ = ["planned", "random_batch", "sgd"]


def sgd(parameters: object) -> torch.optim.Optimizer:
    """Return SGD with momentum at a small rate: what the command line times steps with."""
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)  # type: ignore[arg-type]


def random_batch(shape: tuple[int, ...], batch_size: int, classes: int) -> Batch:
    """Return random inputs and classes."""
    return torch.randn(batch_size, *shape), torch.randint(0, classes, (batch_size,))


def planned(
    model: nn.Module,
    shape: tuple[int, ...],
    batch_size: int,
    classes: int,
    budget: Budget,
    policy: str,
    importance: str,
    *,
    profile: Path | None = None,
    seed: int = 0,
    measure: bool = False,
) -> tuple[PlanRequest, MeasuredPlan | None, Plan]:
    """Return the request, the measurement if asked for, and the plan."""
    chooser, score = make_policy(policy), make_importance(importance)
    batches = [random_batch(shape, batch_size, classes) for _ in range(2)]
    model.train()
    try:
        costs = _costs(model, batches[0], profile)
    except (RuntimeError, ValueError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(
            f"the model cannot train on a batch of shape {(batch_size, *shape)}: {_first_line(error)}"
        ) from None
    state, options = SelectionState(), TrainerOptions(importance=importance, seed=seed)
    state.fit_to(costs.group_names)
    probe = Probe(
        model, classification_loss, costs.graph.groups, batches, sgd, np.random.default_rng(seed)
    )
    state.absorb(score.score(probe), options)
    request = PlanRequest(
        profile=costs,
        budget=budget,
        importance=state.worth(options, costs.parameter_bytes),
        generator=np.random.default_rng(seed),
    )
    if not measure:
        return request, None, chooser.plan(request)
    measured = plan_measured(
        chooser, request,
        lambda plan: measure_plan(model, classification_loss, batches[0], sgd, plan),
    )  # fmt: skip
    return request, measured, measured.plan


def _costs(model: nn.Module, batch: Batch, path: Path | None) -> CostProfile:
    def measure() -> CostProfile:
        return profile_model(model, classification_loss, batch, optimizer_fn=sgd)

    return measure() if path is None else load_or_measure(path, profile_key(model, batch), measure)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
