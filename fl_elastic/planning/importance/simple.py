"""Simple scores for comparison: weight magnitude, gradient norm, and chance."""

from __future__ import annotations

import numpy as np
from torch import nn

from fl_elastic.groups.untouched import untouched
from fl_elastic.planning.importance.base import IMPORTANCES, Importance, Probe, Scores
from fl_elastic.planning.importance.elastic import probe_gradients

__all__ = ["GradientNorm", "Magnitude", "RandomImportance"]


@IMPORTANCES.register("magnitude")
class Magnitude(Importance):
    """Sum of absolute weights (ablation of ElasticTrainer, figure 20)."""

    def score(self, probe: Probe) -> Scores:
        """Return the sum of absolute weights of each group, shape (N,)."""
        parameter = probe.model.get_parameter
        return np.array(
            [
                sum(float(parameter(n).detach().abs().sum()) for n in g.parameters)
                for g in probe.groups
            ]
        )


@IMPORTANCES.register("gradient_norm")
class GradientNorm(Importance):
    """Euclidean norm of the gradient on one batch."""

    batches_needed = 1

    def score(self, probe: Probe) -> Scores:
        """Return the gradient norm of each group, shape (N,); raise TrainingError if it is not finite."""
        names = [name for group in probe.groups for name in group.parameters]
        weights = {n: nn.Parameter(probe.model.get_parameter(n).detach().clone()) for n in names}
        with untouched(probe.model):
            gradients = probe_gradients(probe, probe.batches[0], weights)
        squares = {name: float(gradient.square().sum()) for name, gradient in gradients.items()}
        return np.sqrt([sum(squares[name] for name in g.parameters) for g in probe.groups])


@IMPORTANCES.register("random")
class RandomImportance(Importance):
    """Uniform random scores, a control for comparisons."""

    def score(self, probe: Probe) -> Scores:
        """Return uniform numbers in [0, 1), shape (N,)."""
        return probe.generator.random(len(probe.groups))
