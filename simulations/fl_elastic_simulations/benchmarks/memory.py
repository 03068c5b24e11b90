"""Bytes and peak memory of a training step with lean layers and recomputed blocks, against plain autograd."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pandas as pd
import torch
from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.errors import BudgetError
from fl_elastic.groups import Batch, Mode
from fl_elastic.groups.forward import compute_loss
from fl_elastic.losses import classification_loss
from fl_elastic.methods.joint.policy import JointPolicy
from fl_elastic.named_models import model_builder
from fl_elastic.planning import Plan, Policy
from fl_elastic.planning.plain import FullPolicy
from fl_elastic.planning.recompute import Recomputation, least_memory
from fl_elastic.profiling import CostProfile, profile_model
from fl_elastic.profiling.memory import CODE_BYTES, step_memory
from fl_elastic.training import SelectionState, Timing, TrainerOptions
from fl_elastic.training.apply_plan import plan_applied
from fl_elastic.training.planner import Planner
from fl_elastic_simulations.benchmarks.benchmark import Benchmark, Request, Row, Rows
from fl_elastic_simulations.benchmarks.steps import interleaved_seconds, saved_bytes, sgd, vanilla
from fl_elastic_simulations.engine.worker_processes import worker_processes
from fl_elastic_simulations.unequal.resident import resident_bytes, set_back_peak

_MODELS = ("resnet18", "mobilenet_v2")
# Each is a full step's memory divided by the budget; 0 stands for the planner's least with everything trained.
_SHARES = (2, 4, 8, 16, 0)
_PIXELS, _BATCH, _CLASSES = 128, 8, 10
# So large blocks go back to the system when they are freed, and the resident set is the memory in use.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


class Memory(Benchmark):
    """Bytes and time of a step under memory budgets: with lean layers, with plain autograd, and of full training.

    ResNet-18 and MobileNetV2 at 128 pixels, batch 8, SGD with momentum, exact gradients. Each plan runs as the
    planner made it, then with torch's own operations on exactly the same groups, and beside a step that trains
    everything. Peaks are those of fresh processes.
    """

    name = "memory"

    def cases(self, request: Request, rows: Rows) -> Mapping[str, tuple[Any, ...]]:
        """Return each model with each budget."""
        return {
            f"{model} | {f'1/{share}' if share else 'least'}": (model, share)
            for model in _MODELS
            for share in _SHARES
        }

    def run(self, model: str, share: int) -> Row:
        """Measure one plan."""
        torch.set_num_threads(1)
        return memory_row(_subject(model), share)

    def tables(self, rows: Rows) -> Mapping[str, pd.DataFrame]:
        """Return the table of the bytes that lean layers save, and that of peaks."""
        lines = []
        for name, row in rows.items():
            model, _, budget = name.partition(" | ")
            line = {"model": model, "budget": budget}
            lines.append(line)
            if "refused" in row:
                line["groups"] = "refused"
                continue
            peaks = (row[f"peak_bytes_{way}"] for way in ("lean", "vanilla", "full"))
            line.update(
                {
                    "groups": str(row["groups"]),
                    "saved bytes: times less than the same groups": f"{row['times_less_than_same_groups']:.1f}",
                    "than full training": f"{row['times_less_than_full']:.1f}",
                    "peak, MB: lean, plain, full": ", ".join(f"{peak / 1e6:.0f}" for peak in peaks),
                }
            )
        return {"budgets": pd.DataFrame(lines).set_index("model") if lines else pd.DataFrame()}


@dataclass(frozen=True, eq=False)
class Subject:
    """A model with two batches, and the costs of its step with one thread.

    Attributes
    ----------
    name : str
        Name of a torchvision model, by which a fresh process builds it again.
    model : nn.Module
        The model in training mode.
    batches : list of batch
        Two independent batches.
    profile : CostProfile
        Measured costs of the model's step.
    """

    name: str
    model: nn.Module
    batches: list[Batch]
    profile: CostProfile

    def plan(self, policy: Policy, budget: Budget) -> Plan:
        """Return the policy's plan; raises BudgetError if the policy refuses the budget."""
        importance = policy.needs.own_importance or "elastic"
        planner = Planner(
            self.model, classification_loss, policy=policy, budget=budget,
            options=TrainerOptions(importance=importance, timing=Timing(clock="cpu")), state=SelectionState(),
            optimizer=lambda: sgd(self.model.parameters()),
        )  # fmt: skip
        planner.begin(self.profile, 1, self.batches)
        if policy.needs.importance:
            planner.measure_importance(self.batches)
        return planner.plan(1.0)


def subject_of(name: str, model: nn.Module, batches: list[Batch]) -> Subject:
    """Return a model on two batches of images, with costs measured by the CPU time of one thread."""
    last = torch.channels_last
    batches = [(x.contiguous(memory_format=last), y) for x, y in batches]
    profile = profile_model(model, classification_loss, batches[0], optimizer_fn=sgd, clock="cpu")
    return Subject(name, model, batches, profile)


@cache
def _subject(name: str) -> Subject:
    """Return a torchvision model with random weights on random images."""
    torch.manual_seed(0)
    model = model_builder(name, _CLASSES)().train()
    batches = [
        (torch.randn(_BATCH, 3, _PIXELS, _PIXELS), torch.randint(0, _CLASSES, (_BATCH,)))
        for _ in range(2)
    ]
    return subject_of(name, model, batches)


@cache
def _full_step(of: Subject) -> tuple[Plan, int, float, int]:
    """Return the plan that trains everything, its saved bytes, all its bytes, and its peak."""
    plan = of.plan(FullPolicy(), Budget())
    saved = saved_bytes(of.model, plan, of.batches[0]).total
    memory = step_memory(of.profile, plan.modes)
    return plan, saved, saved + memory.gradients + memory.optimizer, peak_in_fresh_process(of, plan)


def memory_row(of: Subject, share: int, *, repeats: int = 5) -> Row:
    """Return the plan at a share of a full step's memory, with bytes and times of the three ways to run a step.

    If the policy refuses the budget, the row holds only the budget and the reason.
    """
    full, saved_full, bytes_full, peak_full = _full_step(of)
    budget = Budget(memory=bytes_full / share if share else _least(of))
    policy = JointPolicy() if share else FullPolicy()
    # Only whole gradients are allowed: no channels, no filters, and no bias without its weight.
    policy.needs = replace(policy.needs, modes=())
    try:
        plan = of.plan(policy, budget)
    except BudgetError as error:
        return {"budget_bytes": budget.memory, "refused": str(error)}
    plain = vanilla(plan)
    lean_saved, plain_saved = (saved_bytes(of.model, p, of.batches[0]) for p in (plan, plain))
    seconds = interleaved_seconds(of.model, [plan, plain, full], of.batches[0], repeats=repeats)
    again = plan.transform(Recomputation)
    return {
        "groups": int(plan.mask.sum()),
        "depth": plan.depth,
        "recomputed": "" if again is None else " ".join(again.modules),
        "budget_bytes": budget.memory,
        "predicted_bytes": plan.predicted_step_bytes,
        "predicted_saved_bytes": plan.memory(of.profile).activations,
        "saved_bytes_lean": lean_saved.total,
        "saved_bytes_vanilla": plain_saved.total,
        "saved_bytes_full": saved_full,
        "times_less_than_same_groups": plain_saved.total / max(lean_saved.total, 1),
        "times_less_than_full": saved_full / max(lean_saved.total, 1),
        "peak_bytes_lean": peak_in_fresh_process(of, plan),
        "peak_bytes_vanilla": peak_in_fresh_process(of, plain),
        "peak_bytes_full": peak_full,
        "step_time_over_vanilla": seconds[0] / seconds[1],
        "step_time_over_full": seconds[0] / seconds[2],
    }


def _least(of: Subject) -> float:
    # Plans that are timed by CPU time count the code as in a process's first fit.
    profile = replace(of.profile, code_bytes=CODE_BYTES)
    return math.ceil(least_memory(profile, [Mode.FULL] * len(profile), lean=True))


def peak_in_fresh_process(of: Subject, plan: Plan) -> int:
    """Return `peak_of_steps` of a new process with one thread."""
    environment = {**_ALLOCATOR, "OMP_NUM_THREADS": "1"}
    with patch.dict(os.environ, environment), worker_processes(1) as pool:
        return pool.submit(peak_of_steps, of.name, tuple(of.batches[0][0].shape), plan).result()


def peak_of_steps(name: str, shape: tuple[int, ...], plan: Plan) -> int:
    """Take two steps of a plan in this process; return their peak, in bytes above what was resident before.

    The second step has the optimiser's state in memory. A step on two smaller examples goes first, so that the
    memory of loaded code does not count.
    """
    torch.set_num_threads(1)
    model = model_builder(name, _CLASSES)().train()
    _steps(model, plan, _batch((2, *shape[1:])), 1)
    batch = _batch(shape)
    model.zero_grad(set_to_none=True)
    set_back_peak()
    before = resident_bytes("VmRSS")
    _steps(model, plan, batch, 2)
    return resident_bytes("VmHWM") - before


def _steps(model: nn.Module, plan: Plan, batch: Batch, count: int) -> None:
    optimizer = sgd([p for p in model.parameters() if p.requires_grad])
    with plan_applied(plan, model):
        for _ in range(count):
            optimizer.zero_grad(set_to_none=True)
            compute_loss(model, classification_loss, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


def _batch(shape: tuple[int, ...]) -> Batch:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(0, _CLASSES, shape[:1], generator=generator)
    inputs = torch.randn(shape, generator=generator)
    return inputs.contiguous(memory_format=torch.channels_last), targets


BENCHMARK = Memory()
