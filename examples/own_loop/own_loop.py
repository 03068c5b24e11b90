"""Train by a plan in a loop of one's own, and send what it changed to a file.

Nothing here needs Flower: the loop is plain PyTorch, and stays as it was but for one ``with``.
"""

import argparse
import statistics
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from fl_elastic import Budget
from fl_elastic.profiling import profile_model
from fl_elastic.training import apply_plan, changed, plan_for
from fl_elastic.update import Manifest, decode, encode, load_weights, weights_of

Batch = tuple[Tensor, Tensor]


def network() -> nn.Module:
    """Return a convolutional network for pictures of 8 by 8 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(),
        nn.Conv2d(128, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def digits(batch_size: int) -> tuple[list[Batch], Batch]:
    """Return batches to train on and one to test on; the pictures come with scikit-learn."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(found.target)
    order = torch.randperm(len(labels))
    test, train = order[:360], order[360:]
    parts = [part for part in train.split(batch_size) if len(part) == batch_size]
    return [(images[part], labels[part]) for part in parts], (images[test], labels[test])


def one_epoch(
    model: nn.Module, batches: Iterable[Batch], optimizer: torch.optim.Optimizer
) -> list[float]:
    """Train on each batch once and return the processor's seconds of each step."""
    model.train()
    seconds = []
    for inputs, targets in batches:
        started = time.process_time()
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        seconds.append(time.process_time() - started)
    return seconds


def accuracy(model: nn.Module, test: Batch) -> float:
    """Return the share of test pictures that the model gets right."""
    model.eval()
    with torch.no_grad():
        return float((model(test[0]).argmax(1) == test[1]).float().mean())


def main() -> None:
    """Train everything, make a plan, train by it, and send what changed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--speedup", type=float, default=1.5, help="of a step by the plan")
    parser.add_argument("--epochs", type=int, default=5, help="of each of the two trainings")
    parser.add_argument("--output", type=Path, default=Path("update.bin"), help="what is sent")
    given = parser.parse_args()

    # One thread and the processor's own clock: other programs disturb these times least.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, (batches, test) = network(), digits(batch_size=32)
    optimizer_fn = partial(torch.optim.SGD, lr=0.03, momentum=0.9)

    # The loop as it was.
    optimizer = optimizer_fn(model.parameters())
    whole = [s for _ in range(given.epochs) for s in one_epoch(model, batches, optimizer)]
    print(f"everything trained: accuracy {accuracy(model, test):.3f}")

    # The same loop by a plan.
    base = {name: value.clone() for name, value in model.state_dict().items()}
    plan = plan_for(
        model, F.cross_entropy, batches[:2],
        budget=Budget(speedup=given.speedup), optimizer_fn=optimizer_fn,
        profile=profile_model(model, F.cross_entropy, batches[0], optimizer_fn=optimizer_fn),
    )  # fmt: skip
    # A budget that no step fits is kept by fewer steps.
    part = batches[: max(1, int(plan.step_fraction * len(batches)))]
    optimizer = optimizer_fn(model.parameters())
    with apply_plan(model, plan, optimizer):
        planned = [s for _ in range(given.epochs) for s in one_epoch(model, part, optimizer)]
    print(f"trained by the plan: accuracy {accuracy(model, test):.3f}")
    print(f"  trained: {', '.join(plan.trained_parameters)}")
    before, now = statistics.median(whole), statistics.median(planned)
    print(
        f"  a step: {1000 * before:.1f} ms without plan, {1000 * now:.1f} ms by the plan, "
        f"{before / now:.2f} times as fast (asked for: {given.speedup:g}), {len(planned)} of {len(whole)} steps"
    )

    # What travels to a server.
    update = changed(
        model, base, plan, steps=len(planned), num_examples=sum(len(y) for _, y in part)
    )
    manifest = Manifest.of(model)
    given.output.write_bytes(encode(update, manifest, codec="fp16"))
    size = sum(value.numel() * value.element_size() for value in base.values())
    print(f"{given.output}: {given.output.stat().st_size:,} bytes; the whole model has {size:,}")

    # What the server does with it, here with one update: the weights before, plus what changed.
    received = decode(given.output.read_bytes(), manifest)
    copy = network()
    copy.load_state_dict(base)
    weights = weights_of(copy, manifest)
    load_weights(
        copy, manifest,
        {name: value + received.deltas.get(name, np.zeros(1, value.dtype)) for name, value in weights.items()},
    )  # fmt: skip
    print(
        f"read back: {len(received.deltas)} tensors after {max(received.steps.values())} steps on "
        f"{received.num_examples} examples; accuracy {accuracy(copy, test):.3f}"
    )


if __name__ == "__main__":
    main()
