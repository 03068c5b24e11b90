"""Every policy at one budget: transfer to fifty bird species, and few-shot episodes of traffic signs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from fl_elastic.budget import Budget
from fl_elastic.groups import Batch
from fl_elastic.groups.forward import channels_last
from fl_elastic.losses import prototype_logits, prototype_loss
from fl_elastic.named_models import resolve_model
from fl_elastic.planning import POLICIES
from fl_elastic.profiling import CostProfile, profile_model
from fl_elastic.profiling.clock import clock_for
from fl_elastic.profiling.modes import with_modes
from fl_elastic.profiling.profile_key import profile_key
from fl_elastic.training import ElasticTrainer, TrainerOptions
from fl_elastic_simulations.benchmarks.cells import add_missing, finished_cells
from fl_elastic_simulations.benchmarks.results import Results
from fl_elastic_simulations.benchmarks.transfer import TransferMethod, train_cell
from fl_elastic_simulations.data.datasets import Dataset, data_root_folder, load_dataset
from fl_elastic_simulations.data.episodes import Episode, PseudoQueries, sample_episode
from fl_elastic_simulations.models.pretrained import load_pretrained

__all__ = ["COMPARED", "bench_side_by_side", "episode_row", "paired_interval"]

COMPARED = (
    "full", "head", "bias", "last_k", "random", "elastic",
    "gradient_filter", "tinytrain", "sparse_update", "joint",
)  # fmt: skip
_WEIGHTS = "weights/mobilenet_v2_imagenet_onnx7_backbone.npz"
SPEEDUP = 2.0
RATE = 3e-4
SEEDS = (0,)
EPISODES = 200
_ITERATIONS, _PIXELS, _MOST_WAYS, _MOST_SUPPORT, _RATE = 10, 40, 8, 25, 3e-4


def bench_side_by_side(
    results: Results,
    data_root: str | Path | None = None,
    *,
    episodes: int = EPISODES,
    workers: int = 2,
    tell: Callable[[str], None] = print,
) -> None:
    """Train by every policy under a speed-up of 2 per step, from the same weights.

    Transfer: MobileNetV2 on CUB-50, six epochs, one seed. Few shots: episodes of Meta-Dataset's kind from the
    traffic signs, the same ones for every policy; each adapts on the support set by prototypes and
    pseudo-queries, and is tested on the queries. Differences to the joint policy are paired, with 95 % intervals.
    """
    root = str(data_root_folder(data_root))
    _few_shots(results, workers, root, episodes, tell)
    _transfer(results, workers, root, tell)
    _summarise(results, episodes)


def _few_shots(
    results: Results, workers: int, root: str, episodes: int, tell: Callable[[str], None]
) -> None:
    missing = {
        f"episode {number}": (number, root)
        for number in range(episodes)
        if f"episode {number}" not in results.rows
    }
    for done, (name, row) in enumerate(finished_cells(episode_row, missing, workers), start=1):
        results.add(name, row)
        if done % 10 == 0:
            tell(f"{done}/{len(missing)} episodes")


def _transfer(results: Results, workers: int, root: str, tell: Callable[[str], None]) -> None:
    cells = {
        f"transfer {policy} | {seed}": (TransferMethod(policy, policy, SPEEDUP), RATE, seed, root)
        for seed in SEEDS
        for policy in COMPARED
    }
    add_missing(results, train_cell, cells, workers, tell, lambda row: f"{row['accuracy']:.4f}")


def _summarise(results: Results, episodes: int) -> None:
    rows = [results.rows[f"episode {number}"] for number in range(episodes)]
    joint = np.array([row["joint"]["accuracy"] for row in rows])
    for policy in COMPARED:
        chosen = [results.rows[f"transfer {policy} | {seed}"] for seed in SEEDS]
        found = np.array([row[policy]["accuracy"] for row in rows])
        results.add(
            f"summary {policy}",
            {
                "transfer_accuracy": float(np.mean([cell["accuracy"] for cell in chosen])),
                "transfer_seconds": float(np.mean([cell["seconds"] for cell in chosen])),
                "transfer_step_bytes": float(np.mean([cell["step_bytes"] for cell in chosen])),
                "transfer_uplink_bytes": float(np.mean([cell["uplink_bytes"] for cell in chosen])),
                "episodes": episodes,
                "episode_accuracy": float(found.mean()),
                "episode_interval": paired_interval(found),
                "against_joint": float((found - joint).mean()),
                "against_joint_interval": paired_interval(found - joint),
                "episode_seconds": float(np.mean([row[policy]["seconds"] for row in rows])),
                "episode_step_bytes": float(np.mean([row[policy]["step_bytes"] for row in rows])),
            },
        )


def paired_interval(differences: np.ndarray[Any, Any]) -> float:
    """Return half the width of the 95 % interval of a mean (normal approximation).

    Examples
    --------
    >>> round(paired_interval(np.array([1.0, -1.0] * 50)), 3)
    0.197
    """
    return 1.96 * float(np.std(differences, ddof=1)) / math.sqrt(len(differences))


def episode_row(number: int, root: str) -> dict[str, Any]:
    """Adapt to one episode by every policy; return accuracy, seconds and bytes of each."""
    torch.set_num_threads(1)
    data = load_dataset("gtsrb", root)
    generator = np.random.default_rng(number)
    episode = sample_episode(
        data.train_y, generator, most_ways=_MOST_WAYS, most_support=_MOST_SUPPORT
    )
    row: dict[str, Any] = {"ways": episode.ways, "support": len(episode.support)}
    row["none"] = {"accuracy": _accuracy(_backbone(root), data, episode)}
    for policy in COMPARED:
        model = _backbone(root)
        support = _images(data, episode.support)
        classes = torch.from_numpy(episode.support_classes)
        loader = PseudoQueries(support, classes, _ITERATIONS, seed=number)
        batch: Batch = (torch.cat([support, support]), classes)
        trainer = ElasticTrainer(
            model.train(), prototype_loss, _adam, budget=Budget(speedup=SPEEDUP), policy=policy,
            profile=replace(_costs(root), key=profile_key(model, batch)),
            options=TrainerOptions(
                closed_loop=False, clock="cpu", deep_every=0, seed=number, channel_score="l2"
            ),
        )  # fmt: skip
        report = trainer.fit(loader)
        row[policy] = {
            "accuracy": _accuracy(model, data, episode),
            "seconds": report.seconds + report.selection_seconds,
            "steps": report.steps,
            "step_bytes": report.plan.predicted_step_bytes,
        }
    return row


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=_RATE)


def _backbone(root: str) -> nn.Module:
    model = resolve_model("mobilenet_v2", 10)
    model.classifier = nn.Identity()
    load_pretrained(model, Path(root) / _WEIGHTS)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            # Support sets are small: norms keep the statistics of pre-training.
            module.momentum = 0.0
    return model


@cache
def _costs(root: str) -> CostProfile:
    """Return the costs of a step with 2 x 30 images: ratios between policies hold for other sizes too."""
    batch = torch.randn(60, 3, _PIXELS, _PIXELS), torch.arange(30) % 5
    model = _backbone(root).train()
    profile = profile_model(model, prototype_loss, batch, optimizer_fn=_adam, clock="cpu")
    modes = [mode for policy in COMPARED for mode in POLICIES.make(policy).modes]
    return with_modes(profile, model, clock_for(torch.device("cpu"), "cpu"), modes)


def _images(data: Dataset, rows: np.ndarray[Any, Any]) -> Tensor:
    images = torch.from_numpy(data.train_x[rows])
    larger = interpolate(images, size=(_PIXELS, _PIXELS), mode="bilinear", align_corners=False)
    return channels_last(larger)


def _accuracy(model: nn.Module, data: Dataset, episode: Episode) -> float:
    model.eval()
    with torch.no_grad():
        support = model(_images(data, episode.support))
        queries = model(_images(data, episode.query))
        classes = torch.from_numpy(episode.support_classes)
        found = prototype_logits(queries, support, classes).argmax(1)
    return float((found == torch.from_numpy(episode.query_classes)).float().mean())
