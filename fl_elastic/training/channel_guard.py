"""Keep the channels that are not trained where they are, whatever the optimiser does."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_elastic.groups import Mode
from fl_elastic.ops.channels import ChannelSubset
from fl_elastic.planning import Plan

__all__ = ["ChannelGuard", "erase_momentum", "frozen_parameters"]

# By the names that torch's optimisers give them: which way a weight went.
_MOMENTA = ("momentum_buffer", "exp_avg")


@dataclass(frozen=True)
class _Kept:
    """Places of a parameter that stay: whole rows by number, or a mask of what trains."""

    weight: nn.Parameter
    values: Tensor
    rows: Tensor | None = None
    trained: Tensor | None = None

    def put_back(self, scratch: Tensor) -> None:
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
        Its ``channels`` say which are trained.
    model : nn.Module
        At the weights that stay.
    copies : mapping of str to array
        Copies of present weights that somebody else holds already, by name: they are not copied again.
    optimizer : torch optimiser, optional
        Whose momentum of untrained neurons is erased in the end, and the rest of whose state of them is what it is
        now.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        copies: Mapping[str, NDArray[Any]] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self._kept: list[_Kept] = []
        self._optimizer = optimizer
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
                        self._kept.append(_Kept(weight, values, rows=_others(weight, channels)))
                    else:
                        layer = model.get_submodule(name.rpartition(".")[0])
                        trained = _trained(weight, mode, channels, layer)
                        self._kept.append(_Kept(weight, values, trained=trained))
        # Of several types, as with a head in another precision, each has its own.
        self._scratch: dict[torch.dtype, Tensor] = {}
        for kept in self._kept:
            numbers = 0 if kept.rows is None else len(kept.rows) * kept.weight[0].numel()
            longest = self._scratch.get(kept.weight.dtype)
            if longest is None or len(longest) < numbers:
                self._scratch[kept.weight.dtype] = kept.weight.detach().new_empty(numbers)
        self._states = {
            (id(weight), name): value.index_select(0, rows)
            for weight, rows, name, value in self._states_of_rows()
            if name not in _MOMENTA
        }

    def put_back(self) -> None:
        """Write the remembered channels into the weights."""
        with torch.no_grad():
            for kept in self._kept:
                kept.put_back(self._scratch[kept.weight.dtype])
            for weight, rows, name, value in self._states_of_rows():
                # Vectors have whole gradients: who reads the momentum of each step is not to find those.
                if weight.dim() == 1 and name in _MOMENTA:
                    value.index_fill_(0, rows, 0.0)

    @torch.no_grad()
    def settle(self) -> None:
        """Leave the optimiser's state of untrained neurons as it shall be; meanwhile it moves nothing."""
        for weight, rows, name, value in self._states_of_rows():
            before = self._states.get((id(weight), name))
            if before is None:
                # Momentum, or what the first step has made out of zeros.
                value.index_fill_(0, rows, 0.0)
            else:
                value.index_copy_(0, rows, before)

    def _states_of_rows(self) -> Iterator[tuple[nn.Parameter, Tensor, str, Tensor]]:
        """Yield what the optimiser holds of weights with untrained neurons: these rows, its name, and itself."""
        for weight, rows in [(k.weight, k.rows) for k in self._kept if k.rows is not None]:
            found = {} if self._optimizer is None else self._optimizer.state.get(weight, {})
            for name, value in found.items():
                if isinstance(value, Tensor) and value.shape == weight.shape:
                    yield weight, rows, name, value


def frozen_parameters(plan: Plan, model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of which a plan trains nothing."""
    trained = set(plan.trained_parameters)
    return [model.get_parameter(n) for g in plan.groups for n in g.parameters if n not in trained]


@torch.no_grad()
def erase_momentum(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Set the optimiser's momentum of these parameters to zero, if it has any."""
    for parameter in parameters:
        for name, value in optimizer.state.get(parameter, {}).items():
            if name in _MOMENTA and isinstance(value, Tensor):
                value.zero_()


def _others(weight: nn.Parameter, channels: tuple[int, ...]) -> Tensor:
    """Return the rows of a weight that are not among the channels."""
    trained = torch.zeros(len(weight), dtype=torch.bool)
    trained[list(channels)] = True
    return torch.nonzero(~trained)[:, 0].to(weight.device)


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
