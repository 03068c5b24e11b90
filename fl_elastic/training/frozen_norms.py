"""BatchNorm and other norms with statistics that nobody trains: they stay in eval, also after ``model.train()``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from fl_elastic.groups.torch_private import NormWithStatistics


def frozen_norms(model: nn.Module, trained: set[str]) -> list[nn.Module]:
    """Return the norms with running statistics of which no parameter's name is in ``trained``."""
    norms: list[nn.Module] = []
    for prefix, module in model.named_modules():
        if isinstance(module, NormWithStatistics):
            own = [f"{prefix}.{name}" if prefix else name for name, _ in module.named_parameters()]
            if own and not any(name in trained for name in own):
                norms.append(module)
    return norms


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
