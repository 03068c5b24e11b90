"""TimelyFL: more epochs if there is time, fewer layers if there is not."""

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

_MOST = 2


@register_peer("timelyfl")
class TimelyFl(Peer):
    """Train all layers for as many epochs as fit; if not one fits, train the layers next to the output for one.

    After TimelyFL (Zhang et al., CVPR workshops 2023), "-style". Taken from the paper: the workload rule, by which
    the number of epochs is the time divided by that of one full epoch, and if it is below one, a single epoch with
    the part of the model next to the output that can be trained in time; averaging over the clients that trained a
    layer. Assumed: at most twice the epochs of the task, and exactly these without a deadline; the part is measured
    in predicted seconds instead of a share of the layers.

    The asynchronous buffer is left to the server. If not even the head fits, it is trained in fewer steps; a client
    without time for one step stays out. Clients are weighted by their number of examples.
    """

    rule = "contributors"
    weighting = "examples"
    needs_costs = True

    def local_training(self, task: LocalTask) -> LocalResult:
        """Train as much as the time allows."""
        per_epoch = requested_steps(task) // task.epochs
        full = per_epoch * task.profile.full_step_seconds
        epochs = epochs_in_time(task.allowed_seconds, full, task.epochs)
        mask = deepest_suffix(task.profile, task.allowed_seconds / per_epoch)
        return train_mask(task, self.name, mask, epochs=max(epochs, 1))

    def rehearse(self, task: LocalTask) -> None:
        """Determine the part of the model that fits the allowed time, as `local_training` does."""
        per_epoch = requested_steps(task) // task.epochs
        deepest_suffix(task.profile, task.allowed_seconds / per_epoch)


def epochs_in_time(allowed_seconds: float, epoch_seconds: float, epochs: int) -> int:
    """Return how many full epochs fit, at most twice ``epochs``; exactly ``epochs`` without a limit.

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
