"""What a budget is worth from the first fit on, with everything charged: estimate, probe, planning, timing."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fl_elastic.budget import Budget
from fl_elastic.errors import BudgetError
from fl_elastic.groups import Batch
from fl_elastic.losses import classification_loss
from fl_elastic.named_models import build_model
from fl_elastic.training import ElasticTrainer, FitReport, Timing, TrainerOptions
from fl_elastic_simulations.benchmarks.results import Results

__all__ = ["bench_first_fits", "first_fits_markdown"]

_CLASSES = 10
# The shorter a step, the more often: what else the machine does is as long as some of them.
_REPEATS = {0.02: 9, 0.5: 5, math.inf: 3}
_SPEEDUPS = (1.5, 2.0, 3.0)
_DEADLINES = (5, 15)
# Fits after the second one, among which importance may be probed again.
_LATER = 7


def bench_first_fits(results: Results, tell: Callable[[str], None]) -> None:
    """Train each model by plain steps and by fits under budgets, in turn; one thread and its CPU time.

    A first fit knows nothing of the model; a second one of the same trainer knows what the first one learnt. Both
    are charged with all that they do, from the call to the report.
    """
    torch.set_num_threads(1)
    for name, (make, shape) in _models().items():
        if name not in results.rows:
            tell(name)
            results.add(name, _measure(make, shape))


def first_fits_markdown(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table of all models."""
    speedups = " | ".join(f"second at {speedup:g}" for speedup in _SPEEDUPS)
    deadlines = " | ".join(f"deadline {count}" for count in _DEADLINES)
    lines = [
        f"| | first of 50 at 2 | first of 10 at 2 | {speedups} | {deadlines} | "
        "preparing, % | choosing, % | over eight fits, % |",
        "| --- |" + " --- |" * (5 + len(_SPEEDUPS) + len(_DEADLINES)),
    ]
    for name, row in rows.items():
        cells = [f"{row['first_50']:.2f}", f"{row['first_10']:.2f}"]
        cells += [f"{row[f'second_{speedup:g}']:.2f}" for speedup in _SPEEDUPS]
        cells += [
            "refused" if row[f"deadline_{n}"] is None else f"{row[f'deadline_{n}']:.2f}"
            for n in _DEADLINES
        ]
        # Of older rows the last one is not known.
        shares = [row.get(f"{part}_share") for part in ("preparing", "choosing", "later_choosing")]
        cells += ["" if share is None else f"{100 * share:.1f}" for share in shares]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


class _Recurrent(nn.Module):
    """Two layers of LSTM over a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(48, 128, 2, batch_first=True)
        self.head = nn.Linear(128, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.cells(x)[0][:, -1])
        return scores


def _models() -> dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]:
    """Return eight models of unlike kinds, each with the shape of its batches."""

    def vision(name: str, pixels: int) -> Callable[[], nn.Module]:
        return lambda: build_model(name, (3, pixels, pixels), _CLASSES, seed=0)

    def dense() -> nn.Module:
        layers = [nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, _CLASSES))

    return {
        "MobileNetV2": (vision("torchvision:mobilenet_v2", 64), (16, 3, 64, 64)),
        "ResNet-18": (vision("torchvision:resnet18", 64), (8, 3, 64, 64)),
        "SqueezeNet": (vision("torchvision:squeezenet1_1", 64), (16, 3, 64, 64)),
        "ShuffleNetV2": (vision("torchvision:shufflenet_v2_x0_5", 64), (16, 3, 64, 64)),
        "VGG-11-BN": (vision("torchvision:vgg11_bn", 64), (8, 3, 64, 64)),
        "small ViT": (vision("small_vit", 32), (16, 3, 32, 32)),
        "LSTM": (_Recurrent, (16, 32, 48)),
        "dense": (dense, (64, 256)),
    }


def _measure(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> dict[str, Any]:
    torch.manual_seed(0)
    base = make().train()
    batches = _batches(shape)
    first_look = _full(base, batches[:5]) / 5
    ratios: dict[str, list[float]] = {}
    refused: dict[str, int] = {}
    repeats = next(count for seconds, count in _REPEATS.items() if first_look < seconds)
    for repeat in range(repeats):
        full = _full(base, batches[:50])
        trainer, first, _ = _fit(base, batches[:50], Budget(speedup=2.0))
        ratios.setdefault("first_50", []).append(full / first)
        _, short, _ = _fit(base, batches[:10], Budget(speedup=2.0))
        ratios.setdefault("first_10", []).append(_full(base, batches[:10]) / short)
        for speedup in _SPEEDUPS:
            trainer, _, _ = _fit(base, batches[:50], Budget(speedup=speedup))
            # Full steps on both sides of the fit: what else the machine does comes and goes meanwhile.
            full = _full(base, batches[:50])
            second, report = _timed(trainer, batches[:50])
            full = (full + _full(base, batches[:50])) / 2
            ratios.setdefault(f"second_{speedup:g}", []).append(full / second)
            ratios.setdefault("choosing_share", []).append(_choosing(report) / second)
            ratios.setdefault("preparing_share", []).append(report.preparing_seconds / second)
            if repeat == 0:
                # A second fit makes no probe: what the first one learnt is fresh.
                later = [(second, report), *(_timed(trainer, batches[:50]) for _ in range(_LATER))]
                ratios.setdefault("later_choosing_share", []).append(
                    sum(_choosing(each) for _, each in later) / sum(taken for taken, _ in later)
                )
        step = _full(base, batches[:20]) / 20
        for count in _DEADLINES:
            key = f"deadline_{count}"
            try:
                _, taken, _ = _fit(base, batches[:30], Budget(deadline=count * step))
                ratios.setdefault(key, []).append(taken / (count * step))
            except BudgetError:
                refused[key] = refused.get(key, 0) + 1
    row: dict[str, Any] = {key: statistics.median(values) for key, values in ratios.items()}
    for count in _DEADLINES:
        row.setdefault(f"deadline_{count}", None)
        worst = ratios.get(f"deadline_{count}", [0.0])
        row[f"deadline_{count}_most"] = max(worst)
        row[f"deadline_{count}_refused"] = refused.get(f"deadline_{count}", 0)
    row["spread"] = {key: [min(values), max(values)] for key, values in ratios.items()}
    row["full_step_milliseconds"] = 1e3 * step
    return row


def _choosing(report: FitReport) -> float:
    """Return the CPU seconds of all that chose what to train."""
    return report.selection_seconds - report.preparing_seconds


def _batches(shape: tuple[int, ...]) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    distinct = [
        (
            torch.randn(shape, generator=generator),
            torch.randint(0, _CLASSES, (shape[0],), generator=generator),
        )
        for _ in range(5)
    ]
    return distinct * 10


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    # What a step takes does not depend on it; at 0.01 ten fits of VGG-11 with dropout on forty images may diverge.
    return torch.optim.SGD(parameters, lr=0.001, momentum=0.9)


def _full(base: nn.Module, batches: list[Batch]) -> float:
    """Return the CPU seconds of plain training steps."""
    model = copy.deepcopy(base)
    optimizer = _sgd(model.parameters())
    started = time.thread_time()
    for inputs, targets in batches:
        optimizer.zero_grad(set_to_none=True)
        loss = classification_loss(model(inputs), targets)
        loss.item()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return time.thread_time() - started


def _fit(
    base: nn.Module, batches: list[Batch], budget: Budget
) -> tuple[ElasticTrainer, float, FitReport]:
    trainer = ElasticTrainer(
        copy.deepcopy(base), classification_loss, _sgd, budget=budget,
        options=TrainerOptions(full_update_every=0, timing=Timing(clock="cpu")),
    )  # fmt: skip
    seconds, report = _timed(trainer, batches)
    return trainer, seconds, report


def _timed(trainer: ElasticTrainer, batches: list[Batch]) -> tuple[float, FitReport]:
    started = time.thread_time()
    report = trainer.fit(batches)
    return time.thread_time() - started, report
