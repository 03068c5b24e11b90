"""What a fleet would gain by cutting at each place: the worth of what is trained above it, per second of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from fl_elastic.groups import Batch, LossFn
from fl_elastic.groups.untouched import untouched
from fl_elastic.importance import Probe
from fl_elastic.importance.elastic import probe_gradients
from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.measure import OptimizerFn
from fl_elastic.training.costs import lasting_costs
from fl_elastic.training.options import TrainerOptions

__all__ = ["cut_worth"]


def cut_worth(
    model: nn.Module,
    loss_fn: LossFn,
    optimizer_fn: OptimizerFn,
    batches: Sequence[Batch],
    profile: CostProfile,
    options: TrainerOptions,
    examples: int,
) -> dict[str, float]:
    r"""Return the expected loss decrease per second of training down to each place where one can cut.

    The decrease is :math:`-\langle g(B), \Delta w(A)\rangle` over the groups above the cut: the first step of the
    optimiser, from batch A, and the gradient on batch B, both at the present weights. That is what a step gains as
    long as it is short. The seconds are those of a step once the features at the cut are kept. Norms keep their
    statistics, as they do with a cut. The model is left as it was.

    Parameters
    ----------
    model, loss_fn, optimizer_fn
        What is trained, and how.
    batches : sequence of batch
        Two, independent of each other.
    profile : CostProfile
        Of the whole model.
    options : TrainerOptions
        How the prefix runs, and the head that nobody trains; a cut in it is not looked at.
    examples : int
        Of the client, whose features would be kept.

    Returns
    -------
    dict of str to float
        By the deepest group above each place, nearest to the loss first; the last is the whole model's. What would
        increase the loss counts as nothing.
    """
    graph = profile.graph
    names = [name for group in graph.groups for name in group.parameters]
    with untouched(model):
        model.eval()
        before = {name: model.get_parameter(name).detach() for name in names}
        stepped = {name: nn.Parameter(value.clone()) for name, value in before.items()}
        probe = Probe(
            model=model, loss_fn=loss_fn, groups=graph.groups, batches=batches,
            shadow_optimizer=optimizer_fn, generator=np.random.default_rng(options.seed),
        )  # fmt: skip
        second = probe_gradients(probe, batches[-1], stepped)
        for name, gradient in probe_gradients(probe, batches[0], stepped).items():
            stepped[name].grad = gradient
        probe.shadow_optimizer(list(stepped.values())).step()
    gains = {
        name: -float(torch.sum(second[name] * (stepped[name].detach() - before[name])))
        for name in names
    }
    trained = np.array([group.name != options.kept_head for group in graph.groups])
    scores = np.array([sum(gains[name] for name in group.parameters) for group in graph.groups])
    gained = np.cumsum(np.where(trained, scores, 0.0)).clip(min=0.0)
    found: dict[str, float] = {}
    for above in sorted({*(cut.groups_above for cut in graph.cuts), len(graph.groups)}):
        if above and trained[:above].any():
            name = graph.groups[above - 1].name
            costs = lasting_costs(profile, replace(options, cut=name), examples)
            found[name] = float(gained[above - 1]) / costs.full_step_seconds
    return found
