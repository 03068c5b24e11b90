"""Check whether first fits hold memory budgets, by peaks of fresh processes on eight different models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
import torch
from torch import nn
from torch.nn import functional

from fl_elastic.budget import Budget
from fl_elastic.errors import BudgetError
from fl_elastic.groups import Batch
from fl_elastic.groups.forward import compute_loss
from fl_elastic.planning import Plan
from fl_elastic.training import ElasticTrainer, TrainerOptions
from fl_elastic.training.apply_plan import plan_applied
from fl_elastic_simulations.benchmarks.benchmark import Benchmark, Request, Row, Rows
from fl_elastic_simulations.benchmarks.steps import kept_bytes, sgd
from fl_elastic_simulations.benchmarks.unlike_models import UNLIKE_MODELS
from fl_elastic_simulations.unequal.resident import resident_bytes, set_back_peak

__all__ = ["BENCHMARK", "FitPeaks"]

_SHARES = ("1/4", "1/8")
_STEPS = 4


class FitPeaks(Benchmark):
    """Peak memory of first fits with budgets of a quarter and an eighth of what a full step keeps.

    Each fit runs in a process of its own. Its peak is the largest resident set from before the fit until the update
    is handed over, minus the peak of the same process in one inference of the same batch.
    """

    name = "fit-peaks"
    fresh_process = True

    def cases(self, request: Request, rows: Rows) -> Mapping[str, tuple[Any, ...]]:
        """Return plain full steps of each model, then its fits with shares of the bytes that a full step keeps."""
        cases: dict[str, tuple[Any, ...]] = {f"{name} | full": (name,) for name in UNLIKE_MODELS}
        for name in UNLIKE_MODELS:
            if full := rows.get(f"{name} | full"):
                cases |= {
                    f"{name} | {share}": (name, full["kept_bytes"] / int(share[2:]))
                    for share in _SHARES
                }
        return cases

    def run(self, name: str, memory: float | None = None) -> Row:
        """Fit one model once with a budget of ``memory`` bytes, or take plain full steps without a budget."""
        torch.set_num_threads(1)
        kind = UNLIKE_MODELS[name]
        model, batch = kind.model(), kind.batch()
        set_back_peak()
        with torch.no_grad():
            model.eval()(batch[0])
        model.train()
        before = resident_bytes("VmHWM")
        if memory is None:
            return _full_steps(model, batch, before)
        return _fit(model, batch, before, memory)

    def tables(self, rows: Rows) -> Mapping[str, pd.DataFrame]:
        """Return peaks relative to budgets; plain full steps are relative to the bytes that a step keeps."""
        found: dict[str, dict[str, str]] = {}
        for name in UNLIKE_MODELS:
            full = rows.get(f"{name} | full")
            if full is None:
                continue
            found[name] = {
                "full step keeps, MB": f"{full['kept_bytes'] / 1e6:.0f}",
                "plain full steps' peak over that": f"{full['peak_bytes'] / full['kept_bytes']:.2f}",
            }
            for share in _SHARES:
                fit = rows.get(f"{name} | {share}")
                if fit is not None:
                    refused = "refused" in fit
                    found[name] |= {
                        f"{share}: budget, MB": f"{fit['budget_bytes'] / 1e6:.0f}",
                        f"{share}: peak over it": "refused"
                        if refused
                        else f"{fit['peak_over_budget']:.2f}",
                        f"{share}: groups": "none"
                        if refused
                        else f"{fit['groups']} of {fit['of_groups']}",
                    }
        return {"peaks": pd.DataFrame.from_dict(found, orient="index")}


def _full_steps(model: nn.Module, batch: Batch, before: int) -> Row:
    """Return the peak of plain full steps, and the bytes of a step: saved tensors, gradients, optimiser state."""
    optimizer = sgd(model.parameters())
    for _ in range(_STEPS):
        optimizer.zero_grad(set_to_none=True)
        compute_loss(model, functional.cross_entropy, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    peak = resident_bytes("VmHWM") - before
    optimizer.zero_grad(set_to_none=True)
    saved = kept_bytes(lambda: compute_loss(model, functional.cross_entropy, batch), model)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return {"kept_bytes": saved + 2 * weights, "saved_bytes": saved, "peak_bytes": peak}


def _fit(model: nn.Module, batch: Batch, before: int, memory: float) -> Row:
    """Fit under a budget and hand the update over; return the peak, and predicted and counted saved bytes."""
    trainer = ElasticTrainer(
        model, functional.cross_entropy, sgd, budget=Budget(memory=memory),
        options=TrainerOptions(seed=0),
    )  # fmt: skip
    try:
        report = trainer.fit([batch] * _STEPS)
    except BudgetError as error:
        peak = resident_bytes("VmHWM") - before
        return {"budget_bytes": memory, "refused": str(error), "peak_bytes": peak}
    trainer.update()
    peak = resident_bytes("VmHWM") - before
    plan = report.plan
    return {
        "budget_bytes": memory,
        "peak_bytes": peak,
        "peak_over_budget": peak / memory,
        "groups": int(plan.mask.sum()),
        "of_groups": len(plan.groups),
        "depth": plan.depth,
        "based_on": report.based_on,
        "predicted_bytes": plan.predicted_step_bytes,
        **_saved(trainer, plan, batch),
    }


def _saved(trainer: ElasticTrainer, plan: Plan, batch: Batch) -> Row:
    """Return the bytes of the saved tensors of a step, as predicted and as counted by hooks."""
    assert trainer.profile is not None
    model = trainer.model
    trainer.optimizer.zero_grad(set_to_none=True)  # type: ignore[union-attr]
    with plan_applied(plan, model):
        counted = kept_bytes(lambda: compute_loss(model, functional.cross_entropy, batch), model)
    memory = plan.memory(trainer.profile)
    predicted = memory.activations - memory.largest_block
    return {"predicted_saved_bytes": predicted, "counted_saved_bytes": counted}


BENCHMARK = FitPeaks()
