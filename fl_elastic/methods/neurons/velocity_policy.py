"""The fastest neurons under a budget of parameters: Velocity-style."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from fl_elastic.budget import Budget
from fl_elastic.errors import PlanError
from fl_elastic.groups import Mode
from fl_elastic.methods.neurons.motion import Values, within
from fl_elastic.methods.neurons.policy import NeuronPolicy
from fl_elastic.methods.neurons.rows import Chosen, NeuronLayer, fitting, modes_of, neuron_layers
from fl_elastic.planning.channel_modes import refuse_without_layers
from fl_elastic.planning.policy import POLICIES
from fl_elastic.planning.request import PlanRequest
from fl_elastic.profiling import CostProfile

_DEFAULT_SHARE = 0.308


@POLICIES.register("velocity")
class VelocityPolicy(NeuronPolicy):
    """Train the head, and the neurons of largest velocity per parameter that fit a budget: Velocity-style.

    Taken from Quelennec et al. (WACV 2024): the score, the threshold at the first neuron that does not fit, and
    random neurons in the first fits, in which no velocity is known yet. The published code charges a depthwise
    channel for the whole width of its layer, and its random choice exceeds the budget; here a neuron is charged for
    its own weights, and both choices keep the budget. Assumed: only neurons of convolutions and linear layers are
    chosen, and norms stay frozen.

    Trained parameters are limited to a share of those of all neurons, and the step by the budget: if its measured
    costs exceed it, the threshold is raised further. A budget without any limit means the largest share in the
    paper, 0.308.

    Parameters
    ----------
    share : float, optional
        Trained parameters over those of all neurons, in (0, 1]; by default only the budget limits them.
    **more : Any
        See `NeuronPolicy`.
    """

    name: ClassVar[str] = "velocity"

    def __init__(self, share: float | None = None, **more: Any) -> None:
        super().__init__(**more)
        if share is not None and not 0 < share <= 1:
            raise PlanError(f"share {share} must be above 0 and at most 1")
        self.share = share

    def refuse_misfit(self, profile: CostProfile) -> None:
        """Raise PlanError for a model without a convolution or linear layer besides its head."""
        refuse_without_layers(self.name, profile.graph)

    def layers(self, profile: CostProfile) -> dict[int, NeuronLayer]:
        """Return the convolutions and linear layers with neurons, by group index."""
        return {g: layer for g, layer in neuron_layers(profile).items() if not layer.is_norm}

    def modes_for(self, request: PlanRequest, chosen: Mapping[int, Chosen]) -> list[Mode]:
        """Return the modes of all groups; besides the neurons only the head trains."""
        groups, reachable = len(request.profile), request.reachable
        modes = modes_of(groups, chosen, reachable, others=Mode.FROZEN)
        modes[request.profile.graph.head] = Mode.FULL
        return modes

    def choose(self, request: PlanRequest, layers: Mapping[int, NeuronLayer]) -> dict[int, Chosen]:
        """Return the neurons of largest score within the share and the budget."""
        scores = self._scores(request, layers)
        counts = [layers[group].neurons for group in scores]
        sizes = np.repeat([float(layers[group].parameters) for group in scores], counts)
        flat = np.concatenate([*scores.values(), np.zeros(0)])
        total = sum(layer.neurons * layer.parameters for layer in layers.values())
        trains = within(flat, sizes, self._share_of(request) * total)
        threshold = float(flat[~trains].max(initial=-math.inf))
        return fitting(request, scores, threshold, lambda chosen: self.modes_for(request, chosen))

    def _scores(self, request: PlanRequest, layers: Mapping[int, NeuronLayer]) -> dict[int, Values]:
        speeds = self.speeds(request, layers)
        if speeds is not None:
            return {group: speed / layers[group].parameters for group, speed in speeds.items()}
        return self.by_chance(request, layers)

    def _share_of(self, request: PlanRequest) -> float:
        if self.share is not None:
            return self.share
        unlimited = request.budget == Budget() and request.allowed_override is None
        return _DEFAULT_SHARE if unlimited else 1.0
