"""HeteroFL: each client trains the first channels of every layer, as many as it can afford."""

from __future__ import annotations

import numpy as np

from fl_elastic.errors import BudgetError
from fl_elastic.methods.windows.policy import SliceOutPolicy
from fl_elastic.methods.windows.windows import Windows, narrow_profile
from fl_elastic_simulations.peers.base import (
    LocalResult,
    LocalTask,
    Peer,
    register_peer,
    requested_steps,
    steps_in_time,
)
from fl_elastic_simulations.peers.training import put_back_on_error, train_mask, train_policy

RATES = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)


@register_peer("heterofl")
class HeteroFl(Peer):
    """Train a window of the channels of every inner width, as many as fit the time.

    After HeteroFL (Diao et al., ICLR 2021), "-style", with the library's windows. Taken from the paper: nested
    widths 1, 1/2, ..., 1/16 with whole inputs and class scores; the scaler; averages per element over the clients
    that hold it, equally weighted. Assumed: residual streams stay whole, batch norms keep statistics, and no scores
    are masked.

    The rate is the largest with which all of the round's steps fit the time, by the share
    of operations. If not even the narrowest fits, it takes fewer steps. A model without inner widths is trained
    whole.
    """

    rule = "contributors"
    weighting = "uniform"
    needs_costs = True

    def local_training(self, task: LocalTask) -> LocalResult:
        """Choose a width and train it."""
        rate, seconds = affordable_rate(task)
        steps_in_time(task, seconds)
        if rate == 1:
            return train_mask(task, self.name, np.ones(len(task.profile), dtype=bool))
        policy = SliceOutPolicy(rate, every="fit", offset=0)
        with put_back_on_error(task.model):
            result = train_policy(task, policy)
            # If a width turns out to be unusable, a step takes longer than expected.
            if result.host_seconds > task.allowed_seconds * (1 + 1e-9):
                raise BudgetError(
                    f"{task.allowed_seconds:.3g} s do not pay for one step: leave this device out of the round"
                )
        return result

    def rehearse(self, task: LocalTask) -> None:
        """Determine the width."""
        affordable_rate(task)


def affordable_rate(task: LocalTask) -> tuple[float, float]:
    """Return the largest rate whose whole round fits the time, and the seconds of its step.

    If none fits, it is the narrowest; for a model without inner widths it is 1.
    """
    widths, rate, seconds = task.profile.graph.widths, 1.0, task.profile.full_step_seconds
    for rate in RATES if widths else ():
        windows = Windows(widths, rate)
        kept = {width: windows.length(width) for width in widths}
        seconds = narrow_profile(task.profile, kept).full_step_seconds
        if requested_steps(task) * seconds <= task.allowed_seconds * (1 + 1e-9):
            break
    return rate, seconds
