"""Random layers or blocks, as many as fit the time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.profile import Mask
from fl_elastic_simulations.peers.base import (
    LocalResult,
    LocalTask,
    Peer,
    register_peer,
    requested_steps,
    task_generator,
)
from fl_elastic_simulations.peers.early_exits import block_ends
from fl_elastic_simulations.peers.training import mask_of, train_mask


@register_peer("random_layers")
class RandomLayers(Peer):
    """Train random tensor groups, drawn anew by each client in each round.

    After the random-layers training of FEDn's authors, where each client trains a random quarter or half of the
    layers and each layer is averaged over the clients that sent it. "-style", because here the time determines how
    many groups are trained, not a share: groups are added in random order as long as a whole round of steps fits.
    If not even one group fits, the cheapest is trained in fewer steps. Clients are weighted by their number of
    examples.
    """

    rule = "contributors"
    weighting = "examples"
    needs_costs = True

    def local_training(self, task: LocalTask) -> LocalResult:
        """Draw groups and train them."""
        return train_mask(task, self.name, self._drawn(task))

    def rehearse(self, task: LocalTask) -> None:
        """Draw groups."""
        self._drawn(task)

    @staticmethod
    def _drawn(task: LocalTask) -> Mask:
        allowed = task.allowed_seconds / requested_steps(task)
        return random_mask(task.profile, allowed, task_generator(task))


def random_mask(profile: CostProfile, step_seconds: float, generator: np.random.Generator) -> Mask:
    """Return random groups whose step takes at most ``step_seconds``, else the cheapest group.

    Examples
    --------
    >>> from fl_elastic.testing import made_up_profile
    >>> profile = made_up_profile(groups=5)
    >>> mask = random_mask(profile, profile.full_step_seconds / 2, np.random.default_rng(0))
    >>> bool(profile.step_seconds(mask) <= profile.full_step_seconds / 2)
    True
    """
    parts = range(len(profile) + 1)
    mask = _with_random_parts(profile, mask_of(profile, []), parts, step_seconds, generator)
    if not mask.any():
        alone = [profile.step_seconds(mask_of(profile, [group])) for group in range(len(mask))]
        mask[int(np.argmin(alone))] = True
    return mask


def _with_random_parts(
    profile: CostProfile,
    mask: Mask,
    bounds: Sequence[int],
    step_seconds: float,
    generator: np.random.Generator,
) -> Mask:
    """Return the mask with parts added in random order, each one if the step then still fits.

    Parameters
    ----------
    profile : CostProfile
        Cost profile of the N groups.
    mask : array of bool, shape (N,)
        Groups that are trained in any case.
    bounds : sequence of int
        Start of each part in backward order, and the end of the last one.
    step_seconds : float
        Seconds that the step may take.
    generator : numpy.random.Generator
        Generator of the random order.
    """
    limit = math.inf if math.isinf(step_seconds) else step_seconds * (1 + 1e-9)
    for part in generator.permutation(len(bounds) - 1):
        longer = mask.copy()
        longer[bounds[part] : bounds[part + 1]] = True
        if profile.step_seconds(longer) <= limit:
            mask = longer
    return mask


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
    return _with_random_parts(profile, head, bounds, step_seconds, generator)
