"""Blocks by chance, until the time is used up."""

from __future__ import annotations

import numpy as np

from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.profile import Mask
from fl_elastic_simulations.peers.base import register_peer
from fl_elastic_simulations.peers.early_exits import block_ends
from fl_elastic_simulations.peers.masked import mask_of
from fl_elastic_simulations.peers.random_layers import RandomLayers, with_random_parts

__all__ = ["RandomBlocks", "random_blocks"]


@register_peer("random_blocks")
class RandomBlocks(RandomLayers):
    """Train the head and random blocks: each client in each round its own draw.

    After LISA (Pan et al., NeurIPS 2024), "-style": there a fixed number of random middle blocks is trained for
    some steps, with embedding and head always on, on one machine. Here blocks are added in random order as long as
    a whole round of steps with them fits, in a federation, on what the model lets train. Where not even the head
    fits, it is trained in fewer steps.
    """

    def draw(
        self, profile: CostProfile, step_seconds: float, generator: np.random.Generator
    ) -> Mask:
        """Return what is trained where a step may take that long."""
        return random_blocks(profile, step_seconds, generator)


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
    head = mask_of(profile, [profile.graph.head])
    return with_random_parts(profile, head, bounds, step_seconds, generator)
