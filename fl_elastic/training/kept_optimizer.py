"""A trainer's optimiser, made when it is first needed."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from fl_elastic.errors import TrainingError
from fl_elastic.profiling.measure import OptimizerFn

__all__ = ["KeptOptimizer"]


class KeptOptimizer:
    """Calling it returns the optimiser, which is made by the first call.

    A separate object, because a bound method of the trainer would create a reference cycle and keep the weights
    and the optimiser's state in memory until the next garbage collection.

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
        """Return it.

        Raises
        ------
        TrainingError
            If ``optimizer_fn`` returns something else, or an optimiser whose step needs a closure.
        """
        if self.made is None:
            made: object = self._optimizer_fn(
                [p for p in self._model.parameters() if p.requires_grad]
            )
            if not isinstance(made, torch.optim.Optimizer):
                raise TrainingError(
                    f"optimizer_fn returned {type(made).__name__}: it must return a torch.optim.Optimizer "
                    "over the parameters that it is given"
                )
            closure = inspect.signature(made.step).parameters.get("closure")
            if closure is not None and closure.default is inspect.Parameter.empty:
                raise TrainingError(
                    f"{type(made).__name__} evaluates the loss several times a step, which a plan cannot price: "
                    "use an optimiser whose step needs no closure, such as SGD or Adam"
                )
            self.made = made
        return self.made
