"""Adapters of which a client only trains the first ranks."""

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
    """Return the rank for a device's speed relative to the fastest: the square root of it as a share, at least one.

    The papers assign each client its rank. This is an assumption, under which a sixteenth of the speed keeps a
    quarter of the ranks.

    Examples
    --------
    >>> [affordable_rank(8, fraction) for fraction in (1.0, 1 / 2, 1 / 4, 1 / 16, 1 / 1000)]
    [8, 5, 4, 2, 1]
    """
    return max(1, math.floor(rank * math.sqrt(fraction)))


def train_at_rank(task: LocalTask, name: str) -> LocalResult:
    """Train all adapters, cut off at the client's rank, in as many steps as the time allows.

    Rows of A and columns of B beyond the rank are zero while the client trains. They stay zero, since the gradient
    of each is a multiple of the other, and count as not trained. A model without adapters is trained as a whole.
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
    """Return the indices of the groups of which the model allows any parameter to train."""
    moving = {name for name, each in model.named_parameters() if each.requires_grad}
    groups = task.profile.graph.groups
    return [i for i, group in enumerate(groups) if moving.intersection(group.parameters)]
