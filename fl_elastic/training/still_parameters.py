"""Keeps frozen parameters still through the steps of optimisers that move parameters without a gradient."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fl_elastic.groups.trainable import trainable
from fl_elastic.optimizers import moves_by_gradient
from fl_elastic.planning import Plan


class StillThroughSteps:
    """Keeps what a plan does not train unchanged, bit by bit, through the steps of any optimiser.

    Torch's own optimisers do not move a parameter without a gradient. Others may treat a missing gradient as zeros,
    so that momentum and decay move the parameter, or may follow other rules: then values are copied before each
    step and put back after it.

    Parameters
    ----------
    model : nn.Module
        The model in training.
    plan : Plan
        The plan it is trained by.
    optimizer : torch optimiser
        The optimiser that takes the steps.

    Attributes
    ----------
    anything_moves : bool
        Whether a step may move a parameter without a gradient.
    still : list of Parameter
        Parameters that are put back: those that the optimiser drives or may know. Parameters that the owner froze
        are not among them.
    """

    def __init__(self, model: nn.Module, plan: Plan, optimizer: torch.optim.Optimizer) -> None:
        trained = {id(model.get_parameter(name)) for name in plan.trained_parameters}
        self.anything_moves = not moves_by_gradient(optimizer)
        driven = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self.still = [
            each
            for each in (model.parameters() if self.anything_moves else ())
            if id(each) not in trained and (id(each) in driven or trainable(each))
        ]
        self._values: list[Tensor] = []
        self._within = 0

    @torch.no_grad()
    def remember(self) -> None:
        """Copy what must stay, before a step; nested steps, as of a derived class, share one copy."""
        if not self._within:
            self._values = [each.detach().clone() for each in self.still]
        self._within += 1

    @torch.no_grad()
    def put_back(self) -> None:
        """Put back what a step has moved, and drop its gradient."""
        for parameter, value in zip(self.still, self._values, strict=True):
            if not torch.equal(parameter, value):
                parameter.copy_(value)
            parameter.grad = None
        self._within -= 1
        if not self._within:
            self._values = []
