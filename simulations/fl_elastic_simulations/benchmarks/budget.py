"""Check that the trainer reaches the requested speed-up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
import torch

from fl_elastic.budget import Budget
from fl_elastic.groups import Batch
from fl_elastic.losses import classification_loss
from fl_elastic.named_models import build_model
from fl_elastic.training import ElasticTrainer, Timing, TrainerOptions
from fl_elastic.training.measured import measure_plan
from fl_elastic_simulations.benchmarks.benchmark import Benchmark, Request, Row, Rows

# Imported to register models.
from fl_elastic_simulations.models import small as _small  # noqa: F401

_MODELS = ("torchvision:resnet18", "torchvision:mobilenet_v2", "torchvision:vgg11_bn", "small_vit")
_SPEEDUPS = (1.5, 2.0, 2.5)
_BATCH, _PIXELS, _CLASSES, _STEPS = 16, 64, 10, 60


class SpeedUps(Benchmark):
    """Requested and achieved speed-ups of four models, by the CPU time of one thread.

    The trainer corrects its plan during training. Each plan is then timed in alternation with full steps of the
    same model, and weighted by the number of steps that it was used for.
    """

    name = "budget"

    def cases(self, request: Request, rows: Rows) -> Mapping[str, tuple[Any, ...]]:
        """Return each model with each speed-up."""
        return {
            f"{name.removeprefix('torchvision:')} at {speedup}": (name, speedup)
            for name in _MODELS
            for speedup in _SPEEDUPS
        }

    def tables(self, rows: Rows) -> Mapping[str, pd.DataFrame]:
        """Return each model's achieved speed-ups, and its largest possible speed-up: the lowest of its profiles."""
        found: dict[str, dict[str, str]] = {}
        floors: dict[str, float] = {}
        for name, row in rows.items():
            model, _, asked = name.partition(" at ")
            floors[model] = min(floors.get(model, row["floor_speedup"]), row["floor_speedup"])
            cells = found.setdefault(model, {})
            cells[f"asked {asked}"] = f"{row['achieved_speedup']:.2f}"
        for model, floor in floors.items():
            found[model]["floor"] = f"{floor:.1f}"
        return {"achieved": pd.DataFrame.from_dict(found, orient="index").rename_axis("model")}

    def run(self, name: str, speedup: float) -> Row:
        """Train one model with one speed-up."""
        torch.set_num_threads(1)
        model = build_model(name, (3, _PIXELS, _PIXELS), _CLASSES, seed=0).train()
        batches = _batches()
        trainer = ElasticTrainer(
            model,
            classification_loss,
            _sgd,
            budget=Budget(speedup=speedup),
            options=TrainerOptions(timing=Timing(clock="cpu")),
        )
        report = trainer.fit(batches)
        ends = [*(start for start, _ in report.plans[1:]), report.steps]
        measured = [
            (
                end - start,
                measure_plan(model, classification_loss, batches[0], _sgd, plan, clock="cpu"),
            )
            for (start, plan), end in zip(report.plans, ends, strict=True)
        ]
        spent = sum(steps / found.speedup for steps, found in measured)
        achieved = report.requested_steps / spent
        last = measured[-1][1]
        return {
            "requested_speedup": speedup,
            "achieved_speedup": achieved,
            "error": achieved / speedup - 1,
            "last_plan_speedup": last.speedup,
            "floor_speedup": report.full_step_seconds / last.plan.floor_step_seconds,
            "steps": report.steps,
            "requested_steps": report.requested_steps,
            "plans": len(report.plans),
            "predicted_speedup_of_first_plan": report.plans[0][1].predicted_speedup,
            "full_step_milliseconds": 1e3 * last.full_step_seconds,
        }


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def _batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    distinct = [
        (
            torch.randn(_BATCH, 3, _PIXELS, _PIXELS, generator=generator),
            torch.randint(0, _CLASSES, (_BATCH,), generator=generator),
        )
        for _ in range(4)
    ]
    return [distinct[step % len(distinct)] for step in range(_STEPS)]


BENCHMARK = SpeedUps()
