"""Freezing means frozen: no gradient, no stale one, and norms that keep their statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from fl_elastic.groups.torch_private import NormWithStatistics
from fl_elastic.groups.trainable import flags_kept
from fl_elastic.planning import Plan

__all__ = ["frozen_outside", "held_in_eval", "training_statistics"]


@contextmanager
def frozen_outside(plan: Plan, model: nn.Module) -> Iterator[None]:
    """Train only what ``plan`` trains inside the block.

    Other parameters get ``requires_grad=False`` and no gradient, because an optimiser keeps moving a tensor
    that has a stale one. A frozen BatchNorm or InstanceNorm runs in eval mode, also after ``model.train()``: it
    neither uses nor updates batch statistics. So does all that is frozen where a plan leaves tokens out, for what a
    block attends to must not change by chance. On leaving, also by an exception, flags and modes are as before.
    """
    trained = set(plan.trained_parameters)
    parameters = dict(model.named_parameters())
    with flags_kept(parameters.values()):
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in trained)
            if name not in trained:
                parameter.grad = None
        held = _frozen_norms if plan.tokens is None else _frozen_modules
        with held_in_eval(model, held(model, trained)):
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


def _frozen_modules(model: nn.Module, trained: set[str]) -> list[nn.Module]:
    """Return the outermost modules that hold parameters, of which none is trained."""
    frozen: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for prefix, module in model.named_modules():
        own = [f"{prefix}.{name}" if prefix else name for name, _ in module.named_parameters()]
        if own and module not in inside and trained.isdisjoint(own):
            frozen.append(module)
            inside.update(module.modules())
    return frozen


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
