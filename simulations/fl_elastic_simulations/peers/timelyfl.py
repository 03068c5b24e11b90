"""More epochs where there is time, fewer layers where there is not."""

from __future__ import annotations

import math

from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.profile import Mask
from fl_elastic_simulations.peers.base import (
    LocalResult,
    LocalTask,
    Peer,
    register_peer,
    requested_steps,
)
from fl_elastic_simulations.peers.training import mask_of, train_mask

__all__ = ["TimelyFl", "deepest_suffix", "epochs_in_time"]

_MOST = 2


@register_peer("timelyfl")
class TimelyFl(Peer):
    """Train all layers for as many epochs as fit; if not one fits, the layers next to the output for one.

    After TimelyFL (Zhang et al., CVPR workshops 2023), "-style". From the paper: the workload rule, epochs = the
    time over that of one full epoch, and where it is below one, a single epoch with that part of the model next to
    the output that can be trained in time; averaging over those who trained a layer. Assumed: at most twice the
    epochs that the task asks for, and just these without a deadline; the part is measured in predicted seconds
    instead of a share of the layers. The asynchronous buffer is the server's affair. Where not even the head fits,
    it is trained in fewer steps; a client that has no time for one stays out. Clients are weighed by their data.
    """

    rule = "contributors"
    weighting = "examples"
    needs_costs = True

    def local_training(self, task: LocalTask) -> LocalResult:
        """Train what the time allows."""
        per_epoch = requested_steps(task) // task.epochs
        full = per_epoch * task.profile.full_step_seconds
        epochs = epochs_in_time(task.allowed_seconds, full, task.epochs)
        mask = deepest_suffix(task.profile, task.allowed_seconds / per_epoch)
        return train_mask(task, self.name, mask, epochs=max(epochs, 1))

    def rehearse(self, task: LocalTask) -> None:
        """Find the part of the model that fits."""
        per_epoch = requested_steps(task) // task.epochs
        deepest_suffix(task.profile, task.allowed_seconds / per_epoch)


def epochs_in_time(allowed_seconds: float, epoch_seconds: float, epochs: int) -> int:
    """Return how many full epochs fit, at most twice those asked for; just these without a limit.

    Examples
    --------
    >>> [epochs_in_time(allowed, 2.0, epochs=3) for allowed in (1.0, 2.0, 5.0, 99.0, math.inf)]
    [0, 1, 2, 6, 3]
    """
    if math.isinf(allowed_seconds):
        return epochs
    return min(math.floor(allowed_seconds / epoch_seconds + 1e-9), _MOST * epochs)


def deepest_suffix(profile: CostProfile, step_seconds: float) -> Mask:
    """Return the most groups next to the output whose step takes at most ``step_seconds``, at least the head.

    Examples
    --------
    >>> from fl_elastic.testing import made_up_profile
    >>> deepest_suffix(made_up_profile(groups=3), 0.0).tolist()
    [True, False, False]
    """
    best = mask_of(profile, [profile.graph.head])
    for count in range(1, len(profile) + 1):
        mask = mask_of(profile, [profile.graph.head, *range(count)])
        if profile.step_seconds(mask) > step_seconds * (1 + 1e-9):
            break
        best = mask
    return best
