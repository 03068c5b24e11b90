"""Methods that train one model on one device, with all their work charged."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.errors import ProfileError
from fl_elastic.groups import Batch, LossFn
from fl_elastic.groups.mode import sent_bytes
from fl_elastic.methods.tokens.kept import on_kept_tokens
from fl_elastic.optimizers import OptimizerFn
from fl_elastic.planning import POLICIES, Plan, PlanRequest, Policy
from fl_elastic.profiling import CostProfile, load_profile, profile_model, save_profile
from fl_elastic.profiling.clock import clock_for
from fl_elastic.training import ElasticTrainer, ForwardOptions, TrainerOptions
from fl_elastic.training.fine_tune import FineTuned, fine_tune
from fl_elastic.training.read_out import read_out
from fl_elastic_simulations.engine.mode_costs import with_modes
from fl_elastic_simulations.peers.random_parts import random_blocks

SPEEDUP = 2.0
"""Budget of a step: at most half of the time of a step that trains everything."""
FEWER = "full, half of the passes"
_CACHE = 1 << 30


class RandomBlocksPolicy(Policy):
    """Train the head and random blocks that fit, drawn anew for each fit, in the style of LISA (NeurIPS 2024)."""

    needs_coverage = False

    def plan(self, request: PlanRequest) -> Plan:
        """Return a plan with the head and random blocks."""
        allowed = request.allowed_step_seconds
        mask = random_blocks(request.profile, allowed, request.generator)
        return request.plan_of_mask("random blocks", mask)


@dataclass(frozen=True)
class Method:
    """One way to train.

    Attributes
    ----------
    policy : str or callable
        Name of a registered policy, or a factory of one; empty for a method without training steps.
    speedup : float or None
        Speed-up of a step that the trainer enforces; None for a method that keeps to the budget anyway.
    share : float
        Passes over the data, as a multiple of the task's.
    each_pass : bool
        Whether each pass is a separate fit, so that the method chooses again before each pass.
    head : bool
        Whether the method trains only the head, with the learning rate for a head.
    kept : bool
        Whether the features below the trained part are kept from pass to pass.
    solved : bool
        Whether the head is solved in closed form; with a policy, both before and after training.
    read : str
        Where a solved head reads, in the form that `fl_elastic.fine_tune` takes.
    cut : str
        Module at which training under a solved head begins; if empty, `fl_elastic.fine_tune` chooses it.
    """

    policy: str | Callable[[], Policy] = ""
    speedup: float | None = SPEEDUP
    share: float = 1.0
    each_pass: bool = False
    head: bool = False
    kept: bool = False
    solved: bool = False
    read: str = "last"
    cut: str = ""

    def passes(self, of_task: int) -> int:
        """Return the number of passes in a task of ``of_task`` passes.

        >>> METHODS[FEWER].passes(6), METHODS["head, kept features"].passes(6)
        (3, 12)
        """
        return max(round(self.share * of_task), 1)


METHODS: dict[str, Method] = {
    "full": Method("full"),
    FEWER: Method("full", speedup=None, share=1 / SPEEDUP),
    "head": Method("head", head=True),
    "head, kept features": Method("head", speedup=None, share=2, head=True, kept=True),
    "solved head": Method(speedup=None, solved=True),
    "solved head, chosen places": Method(speedup=None, solved=True, read="auto"),
    "fine_tune": Method("full", speedup=None, share=1 / 3, kept=True, solved=True),
    "bias": Method("bias"),
    "last_k": Method("last_k"),
    "random": Method("random"),
    "random blocks": Method(RandomBlocksPolicy, each_pass=True),
    "elastic": Method("elastic"),
    "joint": Method("joint"),
    "gradient_filter": Method("gradient_filter"),
    "tinytrain": Method("tinytrain"),
    "sparse_update": Method("sparse_update"),
    "neq": Method("neq", each_pass=True),
    "velocity": Method("velocity", each_pass=True),
    "scotti": Method("scotti", each_pass=True),
    "slice_out": Method("slice_out"),
    "bsr": Method("bsr"),
    "e_vit": Method("e_vit"),
}
"""Methods by their name on the command line and in the tables."""


@dataclass(frozen=True)
class Trained:
    """Result of training by one method.

    Attributes
    ----------
    seconds : float
        CPU time of all its work: estimates, probes, plans, passes for sums, solving, checks, steps.
    steps : int
        Number of training steps.
    plan : Plan or None
        Last plan; None for a method without steps.
    model : nn.Module or None
        Trained model, if it is not the model that was given.
    tuned : FineTuned or None
        Choices and measurements of training under a solved head.
    """

    seconds: float
    steps: int = 0
    plan: Plan | None = None
    model: nn.Module | None = None
    tuned: FineTuned | None = None

    def row(self) -> dict[str, Any]:
        """Return seconds and steps, and two byte counts by the last plan: a step's memory and the update sent."""
        if self.plan is None:
            return {"seconds": self.seconds, "steps": 0, "step_bytes": None, "uplink_bytes": None}
        sent = zip(self.plan.groups, self.plan.modes, strict=True)
        return {
            "seconds": self.seconds,
            "steps": self.steps,
            "step_bytes": self.plan.predicted_step_bytes,
            "uplink_bytes": sum(sent_bytes(group, mode) for group, mode in sent),
        }

    def on_its_tokens(self, model: nn.Module) -> AbstractContextManager[None]:
        """Let the model use, inside the block, only the tokens that it was trained on."""
        return nullcontext() if self.plan is None else on_kept_tokens(model, self.plan)


def keep_costs(
    path: Path,
    model: nn.Module,
    loss_fn: LossFn,
    optimizer_fn: OptimizerFn,
    batch: Batch,
    methods: Iterable[Method],
) -> None:
    """Measure the costs of a step in all modes of the methods, in this thread, unless the file holds them."""
    try:
        load_profile(path)
    except ProfileError:
        torch.set_num_threads(1)
        profile = profile_model(model, loss_fn, batch, optimizer_fn=optimizer_fn, clock="cpu")
        named = [each.policy for each in methods if isinstance(each.policy, str) and each.policy]
        modes = [mode for name in named for mode in POLICIES.make(name).needs.modes]
        clock = clock_for(torch.device("cpu"), "cpu")
        path.parent.mkdir(parents=True, exist_ok=True)
        save_profile(with_modes(profile, model, clock, modes), path)


def train(
    method: Method,
    model: nn.Module,
    loss_fn: LossFn,
    optimizer_fn: OptimizerFn,
    loader: Iterable[Batch],
    *,
    passes: int,
    options: TrainerOptions,
    profile: CostProfile | None = None,
) -> Trained:
    """Train a model in place by one method, in this thread, and count the CPU time of all that the method does.

    Parameters
    ----------
    method : Method
        Way to train.
    model, loss_fn, optimizer_fn, loader
        Arguments of `fl_elastic.training.ElasticTrainer`.
    passes : int
        Passes of this method over the data, see `Method.passes`.
    options : TrainerOptions
        Options of the trainer.
    profile : CostProfile, optional
        Costs measured before, whose time is not counted. By default costs are estimated, and that time is counted.
    """
    started = time.thread_time()
    if not method.policy:
        found = read_out(model, loader, read=method.read)
        return Trained(time.thread_time() - started, model=found.model)
    budget = Budget(speedup=method.speedup)
    policy = method.policy if isinstance(method.policy, str) else method.policy()
    if method.solved:
        done = fine_tune(
            model, loss_fn, optimizer_fn, loader,
            epochs=passes, cut=method.cut, budget=budget, policy=policy, options=options, read=method.read,
        )  # fmt: skip
        assert done.report is not None
        steps, plan = done.report.steps, done.report.plan
        return Trained(time.thread_time() - started, steps, plan, done.model, done)
    if method.kept:
        options = replace(options, forward=ForwardOptions(feature_bytes=_CACHE))
    trainer = ElasticTrainer(
        model, loss_fn, optimizer_fn,
        budget=budget, policy=policy, profile=profile, options=options,
    )  # fmt: skip
    fits: Sequence[int] = [1] * passes if method.each_pass else [passes]
    steps = sum(trainer.fit(loader, epochs=epochs).steps for epochs in fits)
    return Trained(time.thread_time() - started, steps, trainer.plan)
