"""Freeze neurons below a learned threshold, within the budget: SCoTTi-style."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from fl_elastic.errors import PlanError
from fl_elastic.methods.neurons.policy import NeuronPolicy
from fl_elastic.methods.neurons.rows import Chosen, NeuronLayer, fitting
from fl_elastic.planning.policy import POLICIES
from fl_elastic.planning.request import PlanRequest, PolicyMemory

if TYPE_CHECKING:
    import torch
    from torch import nn


_EPS, _MOMENTUM = "eps", "eps_momentum"


@POLICIES.register("scotti")
class ScottiPolicy(NeuronPolicy):
    r"""Train the neurons that are faster than a learned threshold, and groups without neurons: SCoTTi-style.

    The threshold descends its own gradient (Li et al., ICCV workshops 2023), with momentum: :math:`\partial L /
    \partial \epsilon = a \sum \langle \nabla L, m \rangle` over the trained weights, with the learning rate a and
    the momentum m of the previous step. Successive steps in similar directions lower the threshold, so that more
    neurons train. It is learned in every step and used from the next fit on. As in the published code, frozen
    neurons do not count, because their gradients are not computed. If a step does not fit the budget, the threshold
    is raised for this fit until it does. As long as no velocity is known, everything trains, or random neurons if
    not everything fits.

    The optimiser must be SGD with momentum: under any other the threshold does not move.

    Parameters
    ----------
    eps : float
        Initial threshold. The paper does not state its values, so the defaults are those of its code.
    eps_rate, eps_momentum : float
        Learning rate of the threshold, and its momentum.
    **more : Any
        See `NeuronPolicy`.
    """

    name: ClassVar[str] = "scotti"

    def __init__(
        self, eps: float = 0.05, eps_rate: float = 1e-4, eps_momentum: float = 0.9, **more: Any
    ) -> None:
        super().__init__(**more)
        if not (eps >= 0 and eps_rate >= 0 and 0 <= eps_momentum < 1):
            raise PlanError(
                f"eps {eps} and eps_rate {eps_rate} must not be negative, eps_momentum {eps_momentum} in [0, 1)"
            )
        self.eps, self.eps_rate, self.eps_momentum = eps, eps_rate, eps_momentum

    def choose(self, request: PlanRequest, layers: Mapping[int, NeuronLayer]) -> dict[int, Chosen]:
        """Return the neurons faster than the threshold, which the budget may raise."""
        speeds = self.speeds(request, layers)
        threshold = float(request.memory.of(self.name).facts.get(_EPS, self.eps))
        if speeds is None:
            speeds, threshold = self.by_chance(request, layers), 0.0
        return fitting(request, speeds, threshold, lambda chosen: self.modes_for(request, chosen))

    def after_backward(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        memory: PolicyMemory,
    ) -> PolicyMemory:
        """Update the threshold by the inner product of a step's gradients and the previous steps' momentum."""
        memory = memory.of(self.name)
        layers = {name.removeprefix("output/") for name in memory.arrays}
        gradient = threshold_gradient(
            [p for name, p in parameters.items() if name.rpartition(".")[0] in layers], optimizer
        )
        if not math.isfinite(gradient):
            return memory
        momentum = self.eps_momentum * float(memory.facts.get(_MOMENTUM, 0.0)) + gradient
        eps = float(memory.facts.get(_EPS, self.eps)) - self.eps_rate * momentum
        facts = {**memory.facts, _EPS: max(eps, 0.0), _MOMENTUM: momentum}
        return replace(memory, facts=facts)


def threshold_gradient(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> float:
    """Return the gradient of the loss with respect to the threshold; 0 if the optimiser has no momentum."""
    wanted, total = {id(parameter) for parameter in parameters}, 0.0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in wanted and parameter.grad is not None:
                momentum = optimizer.state.get(parameter, {}).get("momentum_buffer")
                if momentum is not None:
                    aligned = (parameter.grad * momentum).sum()
                    total += float(group["lr"]) * float(aligned)
    return total
