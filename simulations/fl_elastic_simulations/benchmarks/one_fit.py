"""A first fit under a memory budget in a process of its own, and the most memory that it took.

``python -m fl_elastic_simulations.benchmarks.one_fit MODEL [BYTES]`` prints one row as JSON.
Peaks are of the resident set, above that of one inference of the same batch by the same process before. Without a
budget it takes plain full steps.
"""

from __future__ import annotations

import json
import sys
from typing import Any

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
from fl_elastic_simulations.benchmarks.one_step import resident_bytes, set_back_peak
from fl_elastic_simulations.benchmarks.steps import kept_bytes, sgd
from fl_elastic_simulations.benchmarks.unlike_models import UNLIKE_MODELS

__all__ = ["main", "run_fit", "run_full"]

_STEPS = 4


def run_full(name: str) -> dict[str, Any]:
    """Take plain full steps; return their peak and the bytes that one keeps: saved tensors, gradients and state."""
    model, batch, before = _after_inference(name)
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


def run_fit(name: str, memory: float) -> dict[str, Any]:
    """Fit once under a budget and hand the update over; return its peak, and saved bytes predicted and counted."""
    model, batch, before = _after_inference(name)
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


def main() -> None:
    """Print the row of the model and the budget that the arguments name."""
    torch.set_num_threads(1)
    name, *memory = sys.argv[1:]
    print(json.dumps(run_fit(name, float(memory[0])) if memory else run_full(name)))


def _after_inference(name: str) -> tuple[nn.Module, Batch, int]:
    """Return a model and its batch, with the peak of this process up to the end of one inference."""
    kind = UNLIKE_MODELS[name]
    model, batch = kind.model(), kind.batch()
    set_back_peak()
    with torch.no_grad():
        model.eval()(batch[0])
    model.train()
    return model, batch, resident_bytes("VmHWM")


def _saved(trainer: ElasticTrainer, plan: Plan, batch: Batch) -> dict[str, Any]:
    """Return the bytes of a step's saved tensors as they were predicted, and as hooks count them."""
    assert trainer.profile is not None
    model = trainer.model
    trainer.optimizer.zero_grad(set_to_none=True)  # type: ignore[union-attr]
    with plan_applied(plan, model):
        counted = kept_bytes(lambda: compute_loss(model, functional.cross_entropy, batch), model)
    memory = plan.memory(trainer.profile)
    predicted = memory.activations - memory.largest_block
    return {"predicted_saved_bytes": predicted, "counted_saved_bytes": counted}


if __name__ == "__main__":
    main()
