"""Check that the trainer holds the speed-up that was asked for."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fl_elastic.bench.results import Results
from fl_elastic.budget import Budget
from fl_elastic.groups import Batch, compute_loss
from fl_elastic.losses import classification_loss
from fl_elastic.profiling import profile_model
from fl_elastic.simulation import build_model
from fl_elastic.training import ElasticTrainer, TrainerOptions

__all__ = ["bench_budget"]

_MODELS = ("torchvision:resnet18", "torchvision:mobilenet_v2", "torchvision:vgg11_bn", "small_vit")
_SPEEDUPS = (1.5, 2.0, 2.5)
_BATCH, _PIXELS, _CLASSES, _STEPS = 16, 64, 10, 100


def bench_budget(results: Results) -> None:
    """Train each model under each speed-up, a full step of a twin between any two steps.

    One thread and its CPU time. The achieved speed-up is the time of the full steps over the time of the
    elastic steps, both taken in the same interleaved run; where the budget is below the floor, steps left
    out count as saved.
    """
    torch.set_num_threads(1)
    for name in _MODELS:
        for speedup in _SPEEDUPS:
            cell = f"{name.removeprefix('torchvision:')} at {speedup}"
            if cell not in results.rows:
                results.add(cell, _measure(name, speedup))


class _Interleaved:
    """A loader that takes one full step of a twin model before it gives each batch."""

    def __init__(self, twin: nn.Module) -> None:
        self._twin = twin
        self._optimizer = _sgd(twin.parameters())
        generator = torch.Generator().manual_seed(0)
        self._batches = [
            (
                torch.randn(_BATCH, 3, _PIXELS, _PIXELS, generator=generator),
                torch.randint(0, _CLASSES, (_BATCH,), generator=generator),
            )
            for _ in range(4)
        ]
        self.dataset_size = _STEPS * _BATCH
        self.full_seconds: list[float] = []

    def __len__(self) -> int:
        return _STEPS

    def __iter__(self) -> Iterator[Batch]:
        self.full_seconds = []
        for step in range(_STEPS):
            batch = self._batches[step % len(self._batches)]
            started = time.thread_time()
            self._optimizer.zero_grad(set_to_none=True)
            compute_loss(self._twin, classification_loss, batch).backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            self.full_seconds.append(time.thread_time() - started)
            yield batch


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def _measure(name: str, speedup: float) -> dict[str, Any]:
    model = build_model(name, (3, _PIXELS, _PIXELS), _CLASSES, seed=0).train()
    loader = _Interleaved(copy.deepcopy(model))
    batch = next(iter(loader))
    profile = profile_model(model, classification_loss, batch, optimizer_fn=_sgd, clock="cpu")
    trainer = ElasticTrainer(
        model,
        classification_loss,
        _sgd,
        budget=Budget(speedup=speedup),
        profile=profile,
        options=TrainerOptions(clock="cpu"),
    )
    report = trainer.fit(loader)
    full = sum(loader.full_seconds[: report.steps]) / report.steps
    achieved = full * report.requested_steps / report.seconds
    return {
        "requested_speedup": speedup,
        "achieved_speedup": achieved,
        "error": achieved / speedup - 1,
        "floor_speedup": profile.full_step_seconds / profile.floor_step_seconds,
        "steps": report.steps,
        "requested_steps": report.requested_steps,
        "plans": len(report.plans),
        "predicted_speedup_of_first_plan": report.plans[0][1].predicted_speedup,
        "full_step_milliseconds": 1e3 * full,
    }
