"""Few-shot episodes of traffic signs: MobileNetV2 adapts by prototypes and pseudo-queries, in ten steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from fl_elastic.groups import Batch
from fl_elastic.groups.forward import channels_last
from fl_elastic.losses import prototype_logits, prototype_loss
from fl_elastic.planning import POLICIES, Policy
from fl_elastic.profiling import CostProfile, load_profile
from fl_elastic.profiling.profile import profile_key
from fl_elastic.training import Timing, TrainerOptions
from fl_elastic_simulations.benchmarks.one_budget import METHODS, Method, keep_costs, train
from fl_elastic_simulations.benchmarks.transfer import pretrained_mobilenet
from fl_elastic_simulations.data.datasets import Dataset, load_dataset
from fl_elastic_simulations.data.episodes import Episode, PseudoQueries, sample_episode

__all__ = ["EPISODES", "few_shots_row", "keep_few_shots_costs"]

EPISODES = 40
"""Number of episodes for each seed."""
_ITERATIONS, _PIXELS, _MOST_WAYS, _MOST_SUPPORT, _RATE = 10, 40, 8, 25, 3e-4


def few_shots_row(
    method: Method, seed: int, root: str, costs: Path, episodes: int
) -> dict[str, Any]:
    """Adapt to each episode of a seed; return means over the episodes, and the accuracy of each.

    Parameters
    ----------
    method : Method
        Way to adapt.
    seed : int
        Seed that episodes are drawn with; every method gets the same episodes.
    root : str
        Folder of the datasets.
    costs : Path
        The file of `keep_few_shots_costs`.
    episodes : int
        Number of episodes.
    """
    torch.set_num_threads(1)
    data, profile = load_dataset("gtsrb", root), load_profile(costs)
    rows = [
        _adapted(method, EPISODES * seed + number, data, root, profile)
        for number in range(episodes)
    ]
    bytes_of = {
        name: None if rows[0][name] is None else float(np.mean([row[name] for row in rows]))
        for name in ("step_bytes", "uplink_bytes")
    }
    return {
        **{n: float(np.mean([row[n] for row in rows])) for n in ("accuracy", "seconds", "steps")},
        **bytes_of,
        "accuracies": [round(row["accuracy"], 4) for row in rows],
    }


def _by_weight_norms(named: str | Callable[[], Policy]) -> Policy:
    """Return the policy; without a channel score of its own it chooses channels by the norms of their weights."""
    policy = POLICIES.make(named) if isinstance(named, str) else named()
    if policy.needs.channel_score is None:
        policy.needs = replace(policy.needs, channel_score="l2")
    return policy


def _adapted(
    method: Method, number: int, data: Dataset, root: str, profile: CostProfile
) -> dict[str, Any]:
    generator = np.random.default_rng(number)
    episode = sample_episode(
        data.train_y, generator, most_ways=_MOST_WAYS, most_support=_MOST_SUPPORT
    )
    support = _images(data, episode.support)
    classes = torch.from_numpy(episode.support_classes)
    torch.manual_seed(number)
    model = _backbone(root, None if method.policy else episode.ways).train()
    options = TrainerOptions(
        full_update_every=0, seed=number, timing=Timing(closed_loop=False, clock="cpu")
    )
    if not method.policy:
        done = train(
            method, model, prototype_loss, _adam, [(support, classes)], passes=1, options=options
        )
        solved = done.model or model
        return {"accuracy": _accuracy(solved, data, episode, by_prototypes=False), **done.row()}
    method = replace(method, policy=partial(_by_weight_norms, method.policy))
    batch: Batch = (torch.cat([support, support]), classes)
    loader = PseudoQueries(support, classes, method.passes(_ITERATIONS), seed=number)
    done = train(
        method, model, prototype_loss, _adam, loader,
        passes=1, options=options, profile=replace(profile, key=profile_key(model, batch, _adam)),
    )  # fmt: skip
    return {"accuracy": _accuracy(model, data, episode), **done.row()}


def keep_few_shots_costs(path: Path, root: str) -> None:
    """Measure the costs of a step with 2 x 30 images, once: ratios between methods hold for other sizes too."""
    batch = torch.randn(60, 3, _PIXELS, _PIXELS), torch.arange(30) % 5
    keep_costs(path, _backbone(root).train(), prototype_loss, _adam, batch, METHODS.values())


def _adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=_RATE)


def _backbone(root: str, ways: int | None = None) -> nn.Module:
    """Return the network, without a head if ``ways`` is None."""
    model = pretrained_mobilenet(root, ways or 10)
    if ways is None:
        model.classifier = nn.Identity()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            # Support sets are small, so BatchNorm keeps the statistics of pretraining.
            module.momentum = 0.0
    return model


def _images(data: Dataset, rows: np.ndarray[Any, Any]) -> Tensor:
    images = torch.from_numpy(data.train_x[rows])
    larger = interpolate(images, size=(_PIXELS, _PIXELS), mode="bilinear", align_corners=False)
    return channels_last(larger)


def _accuracy(
    model: nn.Module, data: Dataset, episode: Episode, *, by_prototypes: bool = True
) -> float:
    model.eval()
    with torch.no_grad():
        scores: Tensor = model(_images(data, episode.query))
        if by_prototypes:
            support: Tensor = model(_images(data, episode.support))
            classes = torch.from_numpy(episode.support_classes)
            scores = prototype_logits(scores, support, classes)
    return float((scores.argmax(1) == torch.from_numpy(episode.query_classes)).float().mean())
