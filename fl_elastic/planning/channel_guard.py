"""Keeps the channels that a plan does not train unchanged, whatever momentum and weight decay do.

`fl_elastic.training.apply_plan` keeps whole parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_elastic.groups import Mode

if TYPE_CHECKING:
    from fl_elastic.planning.plan import Plan


@dataclass(frozen=True)
class RestOfWeight:
    """The untrained rest of a parameter: whole rows by index, or all that a mask does not select."""

    weight: nn.Parameter
    values: Tensor
    rows: Tensor | None = None
    trained: Tensor | None = None

    def put_back(self, scratch: Tensor) -> None:
        """Write the remembered values of the rest into the weight."""
        if self.rows is not None:
            shape = (len(self.rows), *self.weight.shape[1:])
            rows = scratch[: math.prod(shape)].view(shape)
            torch.index_select(self.values, 0, self.rows, out=rows)
            self.weight.index_copy_(0, self.rows, rows)
        elif self.trained is not None:
            self.weight.copy_(torch.where(self.trained, self.weight, self.values))


class ChannelGuard:
    """Remembers the untrained channels of a plan and puts them back after each step.

    A zero gradient is not enough: momentum from an earlier plan and weight decay would move them.

    Parameters
    ----------
    plan : Plan
        Its ``channels`` say which channels are trained.
    model : nn.Module
        The model at the weights to keep.
    copies : mapping of str to array
        Copies of the present weights that the caller already holds, by name; these weights are not copied again.
    """

    def __init__(
        self, plan: Plan, model: nn.Module, copies: Mapping[str, NDArray[Any]] | None = None
    ) -> None:
        self._rest: list[RestOfWeight] = []
        for group, mode in zip(plan.groups, plan.modes, strict=True):
            for name in group.parameters if group.name in plan.channels else ():
                weight = model.get_parameter(name)
                if mode.trains_part_of(weight.shape):
                    held = None if copies is None else copies.get(name)
                    values = (
                        weight.detach().clone()
                        if held is None
                        else torch.as_tensor(held, device=weight.device, dtype=weight.dtype)
                    )
                    channels = plan.channels[group.name]
                    if mode.axis == "neuron":
                        rest = RestOfWeight(weight, values, rows=_others(weight, channels))
                    else:
                        layer = model.get_submodule(name.rpartition(".")[0])
                        rest = RestOfWeight(
                            weight, values, trained=_trained(weight, mode, channels, layer)
                        )
                    self._rest.append(rest)
        # One buffer per dtype: a head may have another precision.
        self._scratch: dict[torch.dtype, Tensor] = {}
        for rest in self._rest:
            numbers = 0 if rest.rows is None else len(rest.rows) * rest.weight[0].numel()
            longest = self._scratch.get(rest.weight.dtype)
            if longest is None or len(longest) < numbers:
                self._scratch[rest.weight.dtype] = rest.weight.detach().new_empty(numbers)

    @property
    def untrained_rows(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Weights with whole untrained rows, and the indices of these rows."""
        return [(rest.weight, rest.rows) for rest in self._rest if rest.rows is not None]

    def remember(self) -> None:
        """Do nothing: the values to restore were copied when the guard was made."""

    @torch.no_grad()
    def put_back(self) -> None:
        """Write the remembered channels into the weights."""
        for rest in self._rest:
            rest.put_back(self._scratch[rest.weight.dtype])

    def finalize(self) -> None:
        """Do nothing: the optimiser's state of untrained channels is left as it is."""


def _others(weight: nn.Parameter, channels: tuple[int, ...]) -> Tensor:
    """Return the indices of a weight's rows that are not trained channels."""
    trained = torch.zeros(len(weight), dtype=torch.bool)
    trained[list(channels)] = True
    return torch.nonzero(~trained)[:, 0].to(weight.device)


def _trained(
    weight: nn.Parameter, mode: Mode, channels: tuple[int, ...], layer: nn.Module
) -> Tensor:
    """Return a mask of the entries of a weight that its channels train, broadcast over the kernel."""
    # Imported here: few plans train channels.
    from fl_elastic.ops.channels import ChannelSubset

    groups = int(getattr(layer, "groups", 1))
    subset = ChannelSubset.of(channels, mode.axis, weight.shape, groups)
    trained = torch.zeros(weight.shape[:2], dtype=torch.bool)
    rows, columns = (torch.arange(length) for length in weight.shape[:2])
    for block in subset.blocks:
        trained[rows[block.outputs].unsqueeze(1), columns[block.columns].unsqueeze(0)] = True
    return trained.reshape(*weight.shape[:2], *[1] * (weight.dim() - 2)).to(weight.device)
