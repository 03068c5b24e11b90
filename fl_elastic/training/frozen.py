"""Keep parameters that a plan does not train at their values, whatever the optimiser does to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fl_elastic.groups.torch_private import NormWithStatistics, spared_group_norms
from fl_elastic.groups.trainable import flags_kept, trainable
from fl_elastic.planning import Plan
from fl_elastic.profiling.optimizers import moves_by_gradient

__all__ = [
    "StillThroughSteps",
    "frozen_outside",
    "held_in_eval",
    "training_statistics",
]


@contextmanager
def frozen_outside(plan: Plan, model: nn.Module) -> Iterator[None]:
    """Train only what ``plan`` trains inside the block.

    Other parameters get ``requires_grad=False`` and no gradient, because an optimiser keeps moving a tensor that
    has a stale gradient. A frozen BatchNorm or InstanceNorm runs in eval mode, also after ``model.train()``: it
    neither uses nor updates batch statistics. On leaving, also by an exception, flags and modes are restored.
    """
    trained = set(plan.trained_parameters)
    parameters = dict(model.named_parameters())
    with flags_kept(parameters.values()):
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in trained)
            if name not in trained:
                parameter.grad = None
        with held_in_eval(model, _frozen_norms(model, trained)), spared_group_norms(model):
            yield


@contextmanager
def held_in_eval(model: nn.Module, norms: Sequence[nn.Module] | None = None) -> Iterator[None]:
    """Run norms with their present statistics inside the block, also after ``model.train()``; restore all modes.

    Parameters
    ----------
    model : nn.Module
        The model whose modes are restored.
    norms : sequence of nn.Module, optional
        The norms to hold; by default all that have statistics.
    """
    modes = [(module, module.training) for module in model.modules()]
    if norms is None:
        norms = [each for each in model.modules() if isinstance(each, NormWithStatistics)]
    before = [(norm, norm.__dict__.get("train")) for norm in norms]
    for norm in norms:
        norm.eval()
        # An instance attribute shadows the method, so that model.train() does not change this module.
        norm.__dict__["train"] = _StaysInEval(norm)
    try:
        yield
    finally:
        for norm, shadow in before:
            norm.__dict__.pop("train", None)
            if shadow is not None:
                norm.__dict__["train"] = shadow
        for module, mode in modes:
            module.training = mode


class _StaysInEval:
    """Replaces the ``train`` method of a norm by one that does nothing."""

    def __init__(self, norm: nn.Module) -> None:
        self._norm = norm

    def __call__(self, mode: bool = True) -> nn.Module:
        del mode
        return self._norm


def _frozen_norms(model: nn.Module, trained: set[str]) -> list[nn.Module]:
    norms: list[nn.Module] = []
    for prefix, module in model.named_modules():
        if isinstance(module, NormWithStatistics):
            own = [f"{prefix}.{name}" if prefix else name for name, _ in module.named_parameters()]
            if own and not any(name in trained for name in own):
                norms.append(module)
    return norms


def training_statistics(model: nn.Module) -> list[str]:
    """Return the names of the running statistics that a training step would update in the present modes."""
    names = []
    for prefix, module in model.named_modules():
        if (
            isinstance(module, NormWithStatistics)
            and module.training
            and module.track_running_stats
        ):
            names += [
                f"{prefix}.{name}" if prefix else name
                for name, buffer in module.named_buffers(recurse=False)
                if buffer.is_floating_point()
            ]
    return names


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
        Parameters that are put back: those that the optimiser drives or may know, so not a base frozen by its
        owner.
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
