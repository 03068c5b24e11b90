"""Importance of a layer by its Fisher potential."""

from __future__ import annotations

import numpy as np

from fl_elastic.groups.graph import BackwardGraph
from fl_elastic.groups.trace import trace_step
from fl_elastic.planning.importance.base import IMPORTANCES, Importance, Probe, Scores
from fl_elastic.planning.importance.channel_scores import FisherChannels
from fl_elastic.planning.importance.channels import ChannelScore
from fl_elastic.planning.importance.samples import micro_batches, norms_at_rest


@IMPORTANCES.register("fisher")
class FisherImportance(Importance):
    r"""Fisher potential of a layer, :math:`P_i = \sum_o \Delta_o` over its output channels (TinyTrain, ICML 2024).

    Only two-dimensional convolutions and linear layers have a potential, because TinyTrain trains nothing else. All
    other groups, including norms and single biases, get 0.
    """

    batches_needed = 1
    by_example = True

    def channels(self) -> ChannelScore:
        """Return the channel score that is summed over a layer's output channels."""
        return FisherChannels()

    def score(self, probe: Probe) -> Scores:
        """Return the potential of each group, shape (N,); raise TrainingError if it is not finite."""
        found = self.channels().once(probe, _graph_of_one_example(probe))
        return np.array(
            [_total(found[g.name].outputs) if g.name in found else 0.0 for g in probe.groups]
        )


def _graph_of_one_example(probe: Probe) -> BackwardGraph:
    with norms_at_rest(probe.model, probe.groups, probe.loss_fn):
        batch, _ = next(micro_batches(probe.model, probe.batches, 1))
        return trace_step(probe.model, probe.loss_fn, batch).graph


def _total(outputs: Scores | None) -> float:
    return 0.0 if outputs is None else float(outputs.sum())
