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

    Other parameters get ``requires_grad=False`` and no gradient, because an optimiser keeps moving a tensor
    that has a stale one. A frozen BatchNorm or InstanceNorm runs in eval mode, also after ``model.train()``: it
    neither uses nor updates batch statistics. On leaving, also by an exception, flags and modes are as before.
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
    """Run norms with the statistics that they have, also after ``model.train()``; all modes are put back.

    Parameters
    ----------
    model : nn.Module
        Whose modes are put back.
    norms : sequence of nn.Module, optional
        Which; all of the model that have statistics, if left out.
    """
    modes = [(module, module.training) for module in model.modules()]
    if norms is None:
        norms = [each for each in model.modules() if isinstance(each, NormWithStatistics)]
    before = [(norm, norm.__dict__.get("train")) for norm in norms]
    for norm in norms:
        norm.eval()
        # An instance attribute shadows the method, so that model.train() passes this module by.
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
    """Stands in for the ``train`` method of a norm."""

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
    """Return the names of the running statistics that a training step would update now."""
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
    """Keeps what a plan does not train bit by bit as it is, through the steps of any optimiser.

    That it has no gradient keeps torch's own from moving it. Others may take that for zeros, so that momentum and
    decay move it, or move weights by rules of their own: then values are copied before each step and put back.

    Parameters
    ----------
    model : nn.Module
        In training.
    plan : Plan
        By which it trains.
    optimizer : torch optimiser
        Whose steps they are.

    Attributes
    ----------
    anything_moves : bool
        Whether a step may move what has no gradient.
    still : list of Parameter
        What is put back: of what the optimiser may know, so not a base that its owner has frozen.
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
        """Copy what is to stay, before a step; a step may take another one, as that of a class derived from it."""
        if not self._within:
            self._values = [each.detach().clone() for each in self.still]
        self._within += 1

    @torch.no_grad()
    def put_back(self) -> None:
        """Put back what a step has moved."""
        for parameter, value in zip(self.still, self._values, strict=True):
            if not torch.equal(parameter, value):
                parameter.copy_(value)
            parameter.grad = None
        self._within -= 1
        if not self._within:
            self._values = []
