"""A small backbone from a tenth of a public set: from scratch, by its labels, or distilled from a larger one."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate
from torchvision import models
from torchvision.ops.misc import Conv2dNormActivation

from fl_elastic.groups import Batch
from fl_elastic.losses import classification_loss
from fl_elastic.named_models import resolve_model
from fl_elastic.training import evaluate
from fl_elastic.training.head_sums import solve_head
from fl_elastic_simulations.benchmarks.cells import add_missing
from fl_elastic_simulations.benchmarks.results import Results
from fl_elastic_simulations.benchmarks.transfer import Shuffled, cosine_adamw
from fl_elastic_simulations.data.datasets import Dataset, data_root_folder, load_dataset
from fl_elastic_simulations.models.distillation import Recipe, distil
from fl_elastic_simulations.models.pretrained import load_pretrained

__all__ = ["STARTS", "TARGETS", "bench_prepare", "prepare_markdown", "quarter_mobilenet"]

STARTS = ("scratch", "supervised", "distilled")
TARGETS = ("gtsrb", "cub50")
SEEDS = (0, 1)
_WEIGHTS = "weights/mobilenet_v2_imagenet_onnx7_backbone.npz"
_PUBLIC, _COUNT, _PIXELS, _TEACHER_PIXELS = "cifar10_jpegq75", 5000, 48, 96
_EPOCHS, _BATCH = 15, 64
_TRAINED = 1500
_TUNE_EPOCHS, _TUNE_BATCH, _RATE = 4, 16, 1e-3


def quarter_mobilenet(classes: int = 10) -> nn.Module:
    """Return a MobileNetV2 of a quarter of the width throughout: 320 features, 163 thousand weights."""
    model: nn.Module = models.mobilenet_v2(width_mult=0.25, num_classes=classes)
    features = model.get_submodule("features")
    assert isinstance(features, nn.Sequential)
    entering = int(model.get_parameter(f"features.{len(features) - 1}.0.weight").shape[1])
    features[-1] = Conv2dNormActivation(entering, 320, kernel_size=1, activation_layer=nn.ReLU6)
    model.classifier = _head(classes)
    return model


def bench_prepare(
    results: Results,
    data_root: str | Path | None = None,
    *,
    workers: int = 1,
    tell: Callable[[str], None] = print,
) -> None:
    """Prepare a quarter-width MobileNetV2 in each way, and see what it is worth on traffic signs and birds.

    The public set is a tenth of CIFAR-10, without its labels for the distilled one, whose teacher is MobileNetV2
    with ImageNet weights. Both pre-trainings take the same number of steps. Worth is the accuracy of a linear head
    in closed form, and that after four epochs of training everything from that head.
    """
    root = str(data_root_folder(data_root))
    wanted = {f"{start} | {seed}": (start, seed, root) for seed in SEEDS for start in STARTS}
    add_missing(results, prepared_row, wanted, workers, tell, str)


def prepared_row(start: str, seed: int, root: str) -> dict[str, Any]:
    """Prepare one backbone, and try it on each target."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = quarter_mobilenet()
    data = load_dataset(_PUBLIC, root)
    rows = np.random.default_rng(0).permutation(len(data.train_x))[:_COUNT]
    images, classes = _sized(data.train_x[rows]), torch.from_numpy(data.train_y[rows])
    if start == "supervised":
        _supervised(model, images, classes, seed)
    elif start == "distilled":
        teacher = resolve_model("mobilenet_v2", 1000)
        load_pretrained(teacher, Path(root) / _WEIGHTS)
        recipe = Recipe(_EPOCHS, _BATCH, teacher_size=_TEACHER_PIXELS, seed=seed)
        with tempfile.TemporaryDirectory() as folder:
            distil(model, teacher, images.numpy(), recipe, Path(folder), lambda _: None)
    else:
        # Norms that have never seen an image do not normalise, and a head in closed form does not fit them.
        with torch.no_grad():
            for some in torch.split(images, _BATCH):
                model.train()(some)
    row: dict[str, Any] = {}
    prepared = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for target in TARGETS:
        model.classifier = _head(10)
        model.load_state_dict(prepared)
        row[target] = _worth(model, load_dataset(target, root), seed)
    return row


def _supervised(model: nn.Module, images: Tensor, classes: Tensor, seed: int) -> None:
    """Train by labels with the optimiser, steps and mirror images of the distilled one."""
    recipe = Recipe(_EPOCHS, _BATCH)
    optimizer = torch.optim.SGD(
        model.parameters(), recipe.learning_rate, momentum=0.9, weight_decay=recipe.weight_decay
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, _EPOCHS * (len(images) // _BATCH)
    )
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(_EPOCHS):
        for inputs, targets in Shuffled(
            images, classes, _BATCH, int(torch.randint(2**31, (), generator=generator))
        ):
            turned = torch.randint(0, 2, (len(inputs), 1, 1, 1), generator=generator) == 1
            optimizer.zero_grad(set_to_none=True)
            loss = cross_entropy(model(torch.where(turned, inputs.flip(-1), inputs)), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()


def _worth(model: nn.Module, data: Dataset, seed: int) -> dict[str, float]:
    """Return the accuracy of a linear head, and that after a few epochs of training everything."""
    model.classifier = _head(data.classes)
    chosen = np.random.default_rng(seed).permutation(len(data.train_x))[:_TRAINED]
    inputs, targets = _sized(data.train_x[chosen]), torch.from_numpy(data.train_y[chosen])
    test = _batches(_sized(data.test_x), torch.from_numpy(data.test_y))
    solve_head(model, _batches(inputs, targets))
    probe = evaluate(model, classification_loss, test).accuracy
    loader = Shuffled(inputs, targets, _TUNE_BATCH, seed)
    optimizer = cosine_adamw(_RATE, _TUNE_EPOCHS * len(loader))(model.parameters())
    model.train()
    for _ in range(_TUNE_EPOCHS):
        for some, own in loader:
            optimizer.zero_grad(set_to_none=True)
            cross_entropy(model(some), own).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    tuned = evaluate(model, classification_loss, test).accuracy
    assert probe is not None and tuned is not None
    return {"probe": probe, "tuned": tuned}


def _head(classes: int) -> nn.Module:
    return nn.Sequential(nn.Dropout(0.2), nn.Linear(320, classes))


def _sized(images: np.ndarray[Any, np.dtype[np.float32]]) -> Tensor:
    return interpolate(
        torch.from_numpy(images), (_PIXELS, _PIXELS), mode="bilinear", antialias=True
    )


def _batches(inputs: Tensor, targets: Tensor) -> list[Batch]:
    return list(zip(torch.split(inputs, 100), torch.split(targets, 100), strict=True))


def prepare_markdown(rows: dict[str, dict[str, Any]]) -> str:
    """Return the table of the page: means over the seeds, and the lowest and highest."""
    lines = [
        "| start | signs, linear | signs, tuned | birds, linear | birds, tuned |",
        "| --- | --- | --- | --- | --- |",
    ]
    for start in STARTS:
        cells = [rows[f"{start} | {seed}"] for seed in SEEDS]
        worth = [
            _spread([100 * c[t][k] for c in cells]) for t in TARGETS for k in ("probe", "tuned")
        ]
        lines.append(f"| {start} | {' | '.join(worth)} |")
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    return f"{np.mean(values):.1f} ({min(values):.1f} to {max(values):.1f})"
