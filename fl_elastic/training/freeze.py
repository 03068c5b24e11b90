"""Freeze everything that a plan does not train, and undo it afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from fl_elastic.groups.torch_private import NormWithStatistics
from fl_elastic.planning import Plan

__all__ = ["frozen_outside", "training_statistics"]


@contextmanager
def frozen_outside(plan: Plan, model: nn.Module) -> Iterator[None]:
    """Train only what ``plan`` trains inside the block.

    Other parameters get ``requires_grad=False`` and no gradient, because an optimiser keeps moving a tensor
    that has a stale one. A frozen BatchNorm or InstanceNorm runs in eval mode, also after ``model.train()``: it
    neither uses nor updates batch statistics. On leaving, also by an exception, flags and modes are as before.
    """
    trained = set(plan.trained_parameters)
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    frozen_norms = _frozen_norms(model, trained)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
        if name not in trained:
            parameter.grad = None
    for norm in frozen_norms:
        norm.eval()
        # An instance attribute shadows the method, so that model.train() passes this module by.
        norm.__dict__["train"] = _StaysInEval(norm)
    try:
        yield
    finally:
        for norm in frozen_norms:
            norm.__dict__.pop("train", None)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
        for module, mode in modes:
            module.training = mode


class _StaysInEval:
    """Stands in for a frozen norm's ``train`` method."""

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
