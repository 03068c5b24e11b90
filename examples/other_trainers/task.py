"""What the three trainers train: a network for handwritten digits, a plan for it, and what is sent."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from fl_elastic import Budget
from fl_elastic.planning import Plan
from fl_elastic.training import changed, plan_for
from fl_elastic.update import Manifest, encode

adam = partial(torch.optim.AdamW, lr=2e-3)


def network() -> nn.Sequential:
    """Return a convolutional network for pictures of 8 by 8 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Flatten(), nn.Linear(1024, 10),
    )  # fmt: skip


def digits() -> TensorDataset:
    """Return pictures and their classes; they come with scikit-learn."""
    found = load_digits()
    images = torch.tensor(found.images[:1024], dtype=torch.float32).unsqueeze(1) / 16
    return TensorDataset(images, torch.tensor(found.target[:1024]))


def planned(
    model: nn.Module,
    batches: list[Any],
    loss_fn: Callable[[Any, Any], Tensor] = F.cross_entropy,
    speedup: float = 1.5,
) -> tuple[Plan, dict[str, Tensor]]:
    """Return what to train for steps 1.5 times as fast, and the weights before."""
    plan = plan_for(
        model, loss_fn, batches, budget=Budget(speedup=speedup), policy="last_k", optimizer_fn=adam
    )
    return plan, {name: value.clone() for name, value in model.state_dict().items()}


def sent(
    name: str, model: nn.Module, base: dict[str, Tensor], plan: Plan, steps: int, examples: int
) -> None:
    """Write what travels to a server, and say what it holds."""
    update = changed(model, base, plan, steps=steps, num_examples=examples)
    file = Path(f"{name}.bin")
    file.write_bytes(encode(update, Manifest.of(model), codec="fp16"))
    held = sorted(
        each for each, value in model.state_dict().items() if torch.equal(value, base[each])
    )
    print(f"{name}: {steps} steps, trained down to {plan.trained_parameters[-1]}")
    print(
        f"{name}: {len(held)} of {len(base)} tensors are as before, {file.stat().st_size:,} bytes"
    )
    assert not set(held) & set(plan.trained_parameters)


def first_two(loader: Iterable[Any]) -> list[Any]:
    """Return two batches, on which importance is measured."""
    batches = iter(loader)
    return [next(batches), next(batches)]
