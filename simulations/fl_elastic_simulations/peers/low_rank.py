"""Adapters of which a client trains the first ranks alone."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from fl_elastic.update.parts import Masks
from fl_elastic_simulations.models.adapters import low_rank_layers
from fl_elastic_simulations.peers.base import LocalResult, LocalTask
from fl_elastic_simulations.peers.training import train_mask

__all__ = ["affordable_rank", "train_at_rank", "trainable_groups"]


def affordable_rank(rank: int, fraction: float) -> int:
    """Return the rank of a device that is so fast relative to the fastest: by the square root, at least one.

    The papers give each client its rank; this is an assumption, under which a sixteenth of the speed keeps a
    quarter of the ranks.

    Examples
    --------
    >>> [affordable_rank(8, fraction) for fraction in (1.0, 1 / 2, 1 / 4, 1 / 16, 1 / 1000)]
    [8, 5, 4, 2, 1]
    """
    return max(1, math.floor(rank * math.sqrt(fraction)))


def train_at_rank(task: LocalTask, name: str) -> LocalResult:
    """Train all adapters cut off behind the client's rank, in as many steps as the time allows.

    Rows of A and columns of B beyond the rank are zero while the client trains, and stay so, as the gradient of
    each is a multiple of the other. They count as not trained. A model without adapters is trained as a whole.
    """
    parts: dict[str, Masks] = {}
    with torch.no_grad():
        for layer, module in low_rank_layers(task.model).items():
            whole = module.lora_A.out_features
            rank = affordable_rank(whole, task.fraction)
            module.lora_A.weight[rank:] = 0
            module.lora_B.weight[:, rank:] = 0
            kept = np.arange(whole) < rank
            if rank < whole:
                parts |= {f"{layer}.lora_A.weight": (kept, None)}
                parts |= {f"{layer}.lora_B.weight": (None, kept)}
    result = train_mask(task, name, np.ones(len(task.profile), dtype=bool))
    update = result.update
    held = {each: part for each, part in parts.items() if each in update.deltas}
    return replace(result, update=replace(update, parts={**update.parts, **held}))


def trainable_groups(task: LocalTask, model: nn.Module) -> list[int]:
    """Return the groups of the task's costs of which the model lets something train."""
    moving = {name for name, each in model.named_parameters() if each.requires_grad}
    groups = task.profile.graph.groups
    return [i for i, group in enumerate(groups) if moving.intersection(group.parameters)]
