"""What a training step keeps and takes at the most, by lean layers and recomputed blocks against plain autograd."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fl_elastic.budget import Budget
from fl_elastic.errors import BudgetError
from fl_elastic.groups import Mode
from fl_elastic.methods.joint.policy import JointPolicy
from fl_elastic.planning import Needs, Plan, Policy
from fl_elastic.planning.recompute import Recomputation, least_memory
from fl_elastic.profiling.memory import step_memory
from fl_elastic_simulations.benchmarks.peak import Job, Peak, peak_of
from fl_elastic_simulations.benchmarks.results import Results
from fl_elastic_simulations.benchmarks.steps import interleaved_seconds, saved_bytes, vanilla
from fl_elastic_simulations.benchmarks.subject import Subject, subject

__all__ = [
    "FullStep",
    "MemoryCell",
    "bench_memory",
    "cells",
    "full_step",
    "memory_row",
    "mode_counts",
    "plan_policy",
    "plan_summary",
    "reductions",
]

MODELS = ("resnet18", "mobilenet_v2")
SHARES = (2, 4, 8, 16)
POLICIES = ("joint", "joint, exact gradients", "elastic")
TARGET = 4.0
_PIXELS, _BATCH = 128, 8


@dataclass(frozen=True)
class MemoryCell:
    """One row: a model, who chooses, and the full step's memory over the budget; 0 for the planner's least."""

    model: str
    policy: str
    share: int

    @property
    def name(self) -> str:
        """What the table calls it."""
        budget = f"1/{self.share}" if self.share else "least"
        return f"{self.model} | {self.policy} | {budget}"


def cells() -> Iterator[MemoryCell]:
    """Yield all rows, model by model."""
    for model in MODELS:
        for policy in POLICIES:
            for share in SHARES:
                yield MemoryCell(model, policy, share)
        # Everything is trained, exactly: what lean layers and recomputed blocks can save alone.
        yield MemoryCell(model, "full", 0)


def bench_memory(results: Results) -> None:
    """Measure every cell that is missing: ResNet-18 and MobileNetV2 at 128 pixels, batch 8, SGD with momentum.

    Each plan runs as it is realised, then with torch's own operations on exactly the same groups (norms that it
    freezes in eval mode both times), and beside a step that trains everything. Peaks are of fresh processes.
    """
    torch.set_num_threads(1)
    for model in MODELS:
        missing = [c for c in cells() if c.model == model and c.name not in results.rows]
        if missing:
            of = subject(model, _PIXELS, _BATCH)
            full = full_step(of)
            for cell in missing:
                results.add(cell.name, memory_row(cell, of, full))


@dataclass(frozen=True)
class FullStep:
    """A step that trains everything with torch's own operations.

    Attributes
    ----------
    plan : Plan
        That of policy "full".
    saved : int
        Bytes kept for the backward pass, as measured.
    bytes : float
        These, gradients and optimiser state: what budgets are shares of.
    peak : Peak
        Of a fresh process.
    """

    plan: Plan
    saved: int
    bytes: float
    peak: Peak


def full_step(of: Subject) -> FullStep:
    """Measure what training everything keeps and takes."""
    plan = of.plan("full", Budget())
    saved = saved_bytes(of.model, plan, of.graph, of.batches[0]).total
    memory = step_memory(of.profile, plan.modes)
    return FullStep(plan, saved, saved + memory.gradients + memory.optimizer, _peak(of, plan))


def memory_row(
    cell: MemoryCell, of: Subject, full: FullStep, *, repeats: int = 5
) -> dict[str, Any]:
    """Return one row: the plan, and the bytes and times of its three ways to run.

    A budget that the policy refuses gives a row with the reason alone.
    """
    budget = Budget(memory=full.bytes / cell.share if cell.share else _least(of))
    try:
        plan = of.plan(plan_policy(cell.policy), budget)
    except BudgetError as error:
        return {"budget_bytes": budget.memory, "refused": str(error)}
    plain = vanilla(plan)
    lean_saved, plain_saved = (
        saved_bytes(of.model, each, of.graph, of.batches[0]) for each in (plan, plain)
    )
    peaks = [_peak(of, plan), _peak(of, plain)]
    seconds = interleaved_seconds(
        of.model, [plan, plain, full.plan], of.graph, of.batches[0], repeats=repeats
    )
    return {
        **plan_summary(plan),
        "budget_bytes": budget.memory,
        "predicted_bytes": plan.predicted_step_bytes,
        "predicted_saved_bytes": _predicted_saved(of, plan),
        "saved_bytes_lean": lean_saved.total,
        "largest_block_bytes": lean_saved.largest_block,
        "saved_bytes_vanilla": plain_saved.total,
        "saved_bytes_full": full.saved,
        **reductions(lean_saved.total, plain_saved.total, full.saved),
        "peak_bytes_lean": peaks[0].bytes,
        "peak_bytes_vanilla": peaks[1].bytes,
        "peak_bytes_full": full.peak.bytes,
        "peak_was_reset": all(peak.reset for peak in (*peaks, full.peak)),
        "step_time_over_vanilla": seconds[0] / seconds[1],
        "step_time_over_full": seconds[0] / seconds[2],
    }


def plan_policy(name: str) -> str | Policy:
    """Return who plans: a registered policy, or the joint one that may only train groups whole."""
    if name != "joint, exact gradients":
        return name
    policy = JointPolicy()
    # Whole gradients alone: no channels, no filters, and no bias without its weight.
    policy.needs = Needs(importance=True)
    return policy


def plan_summary(plan: Plan) -> dict[str, Any]:
    """Return what is trained, and what runs twice."""
    again = plan.transform(Recomputation)
    return {
        "groups": int(plan.mask.sum()),
        "depth": plan.depth,
        "modes": mode_counts(plan.modes),
        "recomputed": "" if again is None else " ".join(again.modules),
    }


def mode_counts(modes: tuple[Mode, ...]) -> str:
    """Return how many groups are trained in each mode, commonest first.

    Examples
    --------
    >>> mode_counts((Mode.FULL, Mode.FROZEN, Mode.channels(0.25), Mode.FULL))
    'full 2, in/4 1'
    """
    counts = Counter(str(mode) for mode in modes if not mode.is_frozen)
    return ", ".join(f"{mode} {count}" for mode, count in counts.most_common())


def reductions(lean: int, plain: int, whole: int) -> dict[str, Any]:
    """Return how many times less is saved than by plain autograd, and whether the target of 4 is met.

    The same groups are the fair comparison; a step that trains everything also computes more.
    """
    same, full = plain / max(lean, 1), whole / max(lean, 1)
    return {
        "times_less_than_same_groups": same,
        "times_less_than_full": full,
        "target_met_for_same_groups": same >= TARGET,
        "target_met_against_full": full >= TARGET,
    }


def _least(of: Subject) -> float:
    everything = [Mode.FULL] * len(of.profile)
    return math.ceil(least_memory(of.profile, everything, lean=True))


def _predicted_saved(of: Subject, plan: Plan) -> float:
    return plan.memory(of.profile).activations


def _peak(of: Subject, plan: Plan) -> Peak:
    shape = tuple(of.batches[0][0].shape)
    return peak_of(Job(of.name, of.classes, shape, plan, of.graph))
