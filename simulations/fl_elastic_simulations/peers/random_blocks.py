"""Blocks by chance, until the time is used up."""

from __future__ import annotations

import math

import numpy as np

from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.profile import Mask
from fl_elastic_simulations.peers.base import (
    LocalResult,
    LocalTask,
    Peer,
    register_peer,
    task_generator,
)
from fl_elastic_simulations.peers.early_exits import block_ends
from fl_elastic_simulations.peers.masked import mask_of, train_mask
from fl_elastic_simulations.peers.task_data import requested_steps

__all__ = ["RandomBlocks", "random_blocks"]


@register_peer("random_blocks")
class RandomBlocks(Peer):
    """Train the head and random blocks: each client in each round its own draw.

    After LISA (Pan et al., NeurIPS 2024), "-style": there a fixed number of random middle blocks is trained for
    some steps, with embedding and head always on, on one machine. Here blocks are added in random order as long as
    a whole round of steps with them fits, in a federation, on what the model lets train. Where not even the head
    fits, it is trained in fewer steps.
    """

    needs_costs = True

    def local_training(self, task: LocalTask) -> LocalResult:
        """Draw and train."""
        return train_mask(task, self.name, self._drawn(task))

    def rehearse(self, task: LocalTask) -> None:
        """Draw."""
        self._drawn(task)

    def _drawn(self, task: LocalTask) -> Mask:
        allowed = task.allowed_seconds / requested_steps(task)
        return random_blocks(task.profile, allowed, task_generator(task))


def random_blocks(
    profile: CostProfile, step_seconds: float, generator: np.random.Generator
) -> Mask:
    """Return the head and random blocks with which a step takes at most ``step_seconds``.

    Examples
    --------
    >>> from fl_elastic.testing import made_up_profile
    >>> bool(random_blocks(made_up_profile(groups=5), np.inf, np.random.default_rng(0)).all())
    True
    """
    bounds = sorted({0, len(profile), *(cut.groups_above for cut in block_ends(profile.graph))})
    mask = mask_of(profile, [profile.graph.head])
    limit = math.inf if math.isinf(step_seconds) else step_seconds * (1 + 1e-9)
    for block in generator.permutation(len(bounds) - 1):
        longer = mask.copy()
        longer[bounds[block] : bounds[block + 1]] = True
        if profile.step_seconds(longer) <= limit:
            mask = longer
    return mask
