"""The plain answer to a deadline: the whole model, in fewer steps."""

from __future__ import annotations

import numpy as np

from fl_elastic_simulations.peers.base import LocalResult, LocalTask, Peer, register_peer
from fl_elastic_simulations.peers.masked import train_mask

__all__ = ["FullSteps"]


@register_peer("full_steps")
class FullSteps(Peer):
    """Train the whole model in as many steps as the time allows; a client without time for one stays out.

    FedAvg (McMahan et al., AISTATS 2017) with less local work on slow devices, as FedProx (Li et al., MLSys 2020)
    tolerates it, without its proximal term. Clients are weighed by their data.
    """

    rule = "contributors"
    weighting = "examples"

    def local_training(self, task: LocalTask) -> LocalResult:
        """Train everything."""
        return train_mask(task, self.name, np.ones(len(task.profile), dtype=bool))
