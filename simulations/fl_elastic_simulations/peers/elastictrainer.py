"""ElasticTrainer as published, inside FedAvg."""

from __future__ import annotations

import numpy as np

from fl_elastic.planning import Needs, Plan, PlanRequest, Policy
from fl_elastic.training import Timing, TrainerOptions
from fl_elastic.training.selection import Reselection
from fl_elastic_simulations.peers.base import LocalResult, LocalTask, Peer, register_peer
from fl_elastic_simulations.peers.masked import train_by, train_mask
from fl_elastic_simulations.peers.published_selection import published_selection
from fl_elastic_simulations.peers.task_data import requested_steps

__all__ = ["PublishedElasticTrainer", "PublishedSelectionPolicy"]


class PublishedSelectionPolicy(Policy):
    """Choose groups by ElasticTrainer's published dynamic programme.

    Its chain of tensors is our backward order; passing a tensor takes the way from it to the next group. The share
    of the backward pass that the budget leaves is rho (1 + f) - f, with f the forward pass over the backward
    pass, as its authors' notes correct the code's assumption f = 1/2. If everything fits, everything is
    trained; if nothing does, the head in fewer steps.
    """

    needs = Needs(importance="elastic_same_batch")
    needs_coverage = False

    def plan(self, request: PlanRequest) -> Plan:
        """Return what the dynamic programme selects."""
        profile = request.profile
        everything = np.ones(len(profile), dtype=bool)
        if request.fits(everything):
            return request.plan_of_mask("elastictrainer", everything)
        paths = np.append(profile.path_seconds[1:], 0.0)
        backward = float(profile.update_seconds.sum() + paths.sum())
        forward = profile.full_step_seconds - backward
        share = (request.allowed_step_seconds - forward) / backward
        mask = published_selection(profile.update_seconds, paths, request.importance, share)
        return request.plan_of_mask("elastictrainer", mask if mask.any() else request.head_mask())


@register_peer("elastictrainer")
class PublishedElasticTrainer(Peer):
    """Each client runs ElasticTrainer by itself; the server averages whole weight vectors.

    ElasticTrainer (Huang et al., MobiSys 2023) as FedEL (NeurIPS 2025) puts it into FedAvg: every client selects
    for its own speed. From the published code: importance from one batch, which also gives the gradient; the
    dynamic programme with times rounded down to a thousandth; selection anew at the start of each epoch; no
    exploration and no correction by measured times. Assumed: the unit is the tensor group; frozen norms run
    in eval mode, trained ones as usual (the published models keep all of them in inference mode); probes, two
    passes over one batch each, are not taken off the allowed time, but are part of the host seconds; where the
    whole round fits, everything is trained without a probe.
    """

    rule = "all"
    weighting = "examples"
    needs_costs = True

    def local_training(self, task: LocalTask) -> LocalResult:
        """Select and train, epoch by epoch."""
        requested = requested_steps(task)
        if requested * task.profile.full_step_seconds <= task.allowed_seconds * (1 + 1e-9):
            return train_mask(task, self.name, np.ones(len(task.profile), dtype=bool))
        options = TrainerOptions(
            importance="elastic_same_batch", timing=Timing(charge_probes=False)
        )
        # Above one the selection is never kept, whatever the new scores are like.
        rules = Reselection(requested // task.epochs, below_cosine=2.0, smoothing=0.0)
        return train_by(task, PublishedSelectionPolicy(), options, rules=rules)

    def rehearse(self, task: LocalTask) -> None:
        """Solve with all groups worth the same."""
        profile = task.profile
        paths = np.append(profile.path_seconds[1:], 0.0)
        share = task.allowed_seconds / (requested_steps(task) * profile.full_step_seconds)
        published_selection(profile.update_seconds, paths, np.ones(len(profile)), share)
