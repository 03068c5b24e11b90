"""Keep the channels that are not trained where they are, whatever the optimiser does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_elastic.groups import Mode
from fl_elastic.ops.channels import ChannelSubset
from fl_elastic.planning import Plan

__all__ = ["ChannelGuard"]


@dataclass(frozen=True)
class _Kept:
    weight: nn.Parameter
    trained: Tensor
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
    copies : mapping of str to array
        Copies of present weights that somebody else holds already, by name: they are not copied again.
    """

    def __init__(
        self, plan: Plan, model: nn.Module, copies: Mapping[str, NDArray[Any]] | None = None
    ) -> None:
        self._kept: list[_Kept] = []
        for group, mode in zip(plan.groups, plan.modes, strict=True):
            for name in group.parameters if group.name in plan.channels else ():
                weight = model.get_parameter(name)
                if weight.dim() > 1:
                    layer = model.get_submodule(name.rpartition(".")[0])
                    trained = _trained(weight, mode, plan.channels[group.name], layer)
                    held = None if copies is None else copies.get(name)
                    values = (
                        weight.detach().clone()
                        if held is None
                        else torch.as_tensor(held, device=weight.device)
                    )
                    self._kept.append(_Kept(weight, trained, values))

    def put_back(self) -> None:
        """Write the remembered channels into the weights."""
        with torch.no_grad():
            for kept in self._kept:
                kept.weight.copy_(torch.where(kept.trained, kept.weight, kept.values))


def _trained(
    weight: nn.Parameter, mode: Mode, channels: tuple[int, ...], layer: nn.Module
) -> Tensor:
    """Return which rows and columns of a weight its channels train, broadcast over the kernel."""
    groups = int(getattr(layer, "groups", 1))
    subset = ChannelSubset.of(channels, mode.axis, weight.shape, groups)
    trained = torch.zeros(weight.shape[:2], dtype=torch.bool)
    rows, columns = (torch.arange(length) for length in weight.shape[:2])
    for block in subset.blocks:
        trained[rows[block.outputs].unsqueeze(1), columns[block.columns].unsqueeze(0)] = True
    return trained.reshape(*weight.shape[:2], *[1] * (weight.dim() - 2)).to(weight.device)
