"""Adapters of as many of the last blocks as a device can train, of higher rank the nearer to the output."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.memory import mask_bytes
from fl_elastic.profiling.profile import Mask
from fl_elastic_simulations.models.adapters import low_rank_layers
from fl_elastic_simulations.peers.base import (
    LocalResult,
    LocalTask,
    Peer,
    register_peer,
    requested_steps,
)
from fl_elastic_simulations.peers.early_exits import block_ends
from fl_elastic_simulations.peers.low_rank import train_at_ranks

__all__ = ["Legend", "depth_mask", "falling_ranks"]


@register_peer("legend")
class Legend(Peer):
    """Train the adapters of the last blocks, as many as the device can, of a rank that falls towards the input.

    LEGEND (arXiv 2412.20004), "-style", after a summary of it: depth counted from the output by what a device can
    do, higher ranks near the output, the same ranks for all, each layer averaged over those who trained it.
    Assumed: ranks fall evenly from the model's own in the last block; a device can do what one round's steps have
    time for, and what fits its memory. Where the time does not pay for one block, its adapters are trained in fewer
    steps. A model without adapters is trained from the output as deep.
    """

    rule = "contributors"
    weighting = "examples"
    needs_costs = True

    def local_training(self, task: LocalTask) -> LocalResult:
        """Train the last blocks."""
        ranks = falling_ranks(task)
        return train_at_ranks(task, self.name, ranks, self._deepest(task))

    def rehearse(self, task: LocalTask) -> None:
        """Find the depth."""
        self._deepest(task)

    def _deepest(self, task: LocalTask) -> Mask:
        seconds = task.allowed_seconds / requested_steps(task)
        return depth_mask(task.profile, seconds, task.memory_bytes)


def depth_mask(profile: CostProfile, step_seconds: float, memory_bytes: float) -> Mask:
    """Return as many of the last blocks as a step has the time and the memory for, one at the least.

    Examples
    --------
    >>> from fl_elastic.testing import made_up_profile
    >>> profile = made_up_profile(groups=5)
    >>> bool(depth_mask(profile, np.inf, np.inf).all())
    True
    """
    places = np.arange(len(profile))
    fitting = places < 0
    for end in _bounds(profile)[1:]:
        deeper = places < end
        longest = step_seconds * (1 + 1e-9)
        fits = (
            profile.step_seconds(deeper) <= longest and mask_bytes(profile, deeper) <= memory_bytes
        )
        if fitting.any() and not fits:
            break
        fitting = deeper
    return fitting


def falling_ranks(task: LocalTask) -> dict[str, int]:
    """Return the rank of each layer with an adapter: the model's own in the last block, evenly less below it."""
    bounds = _bounds(task.profile)
    place = {
        name: bisect_right(bounds, index) - 1
        for index, group in enumerate(task.profile.graph.groups)
        for name in group.parameters
    }
    block = {
        layer: place[f"{layer}.lora_B.weight"]
        for layer in low_rank_layers(task.model)
        if f"{layer}.lora_B.weight" in place
    }
    order = sorted(set(block.values()))
    return {
        layer: max(1, round(whole * (len(order) - order.index(block[layer])) / len(order)))
        for layer, module in low_rank_layers(task.model).items()
        if layer in block and (whole := module.lora_A.out_features)
    }


def _bounds(profile: CostProfile) -> list[int]:
    """Return where each block begins, in backward order, and the end of the last one."""
    return sorted({0, len(profile), *(cut.groups_above for cut in block_ends(profile.graph))})
