"""A trainer's optimiser, made when it is first needed."""

from __future__ import annotations

import torch
from torch import nn

from fl_elastic.profiling.measure import OptimizerFn

__all__ = ["KeptOptimizer"]


class KeptOptimizer:
    """Calling it returns the optimiser, which is made by the first call.

    An object of its own: who holds a method of the trainer instead, keeps it alive in a circle, with a copy of the
    weights and the optimiser's state, until Python's collector comes by.

    Parameters
    ----------
    model : Module
        Whose trainable parameters are optimised.
    optimizer_fn : callable
        Makes it.

    Attributes
    ----------
    made : Optimizer or None
        What there is so far.
    """

    def __init__(self, model: nn.Module, optimizer_fn: OptimizerFn) -> None:
        self.made: torch.optim.Optimizer | None = None
        self._model, self._optimizer_fn = model, optimizer_fn

    def __call__(self) -> torch.optim.Optimizer:
        """Return it."""
        if self.made is None:
            self.made = self._optimizer_fn([p for p in self._model.parameters() if p.requires_grad])
        return self.made
