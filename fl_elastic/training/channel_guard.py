"""Keep the channels that are not trained where they are, whatever the optimiser does."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fl_elastic.groups import Mode
from fl_elastic.planning import Plan

__all__ = ["ChannelGuard"]


@dataclass(frozen=True)
class _Kept:
    weight: nn.Parameter
    axis: int
    others: Tensor
    values: Tensor


class ChannelGuard:
    """Remembers the untrained channels of a plan and puts them back after each step.

    A zero gradient is not enough: momentum from an earlier plan and weight decay would move them.

    Parameters
    ----------
    plan : Plan
        Its ``channels`` say which are trained.
    model : nn.Module
        At the weights that stay.
    """

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        self._kept: list[_Kept] = []
        for group, mode in zip(plan.groups, plan.modes, strict=True):
            for name in group.parameters if group.name in plan.channels else ():
                weight = model.get_parameter(name)
                if weight.dim() > 1:
                    self._kept.append(_remember(weight, mode, plan.channels[group.name]))

    def put_back(self) -> None:
        """Write the remembered channels into the weights."""
        with torch.no_grad():
            for kept in self._kept:
                kept.weight.index_copy_(kept.axis, kept.others, kept.values)


def _remember(weight: nn.Parameter, mode: Mode, channels: tuple[int, ...]) -> _Kept:
    axis = 0 if mode.axis == "out" or weight.shape[1] == 1 else 1
    others = torch.ones(weight.shape[axis], dtype=torch.bool)
    others[list(channels)] = False
    index = others.nonzero().flatten().to(weight.device)
    return _Kept(weight, axis, index, weight.detach().index_select(axis, index).clone())
