"""Layers that train some of their neurons; the optimiser sees zero gradients for the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_elastic.planning.channel_guard import ChannelGuard
from fl_elastic.planning.lean_layers import LeanLayers

if TYPE_CHECKING:
    from fl_elastic.planning.plan import Plan


# Names of momentum in the state of torch's optimisers.
_MOMENTA = ("momentum_buffer", "exp_avg")


@dataclass(frozen=True)
class NeuronLayers(LeanLayers):
    """Lean layers that erase the momentum of untrained neurons, so that it is zero when they train again."""

    def guard(
        self,
        model: nn.Module,
        plan: Plan,
        copies: Mapping[str, NDArray[Any]] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> NeuronGuard:
        """Return the guard that puts untrained neurons back."""
        return NeuronGuard(plan, model, copies, optimizer)

    @torch.no_grad()
    def finished(self, model: nn.Module, plan: Plan, optimizer: torch.optim.Optimizer) -> None:
        """Set to zero the momentum of parameters that no step trained."""
        trained = set(plan.trained_parameters)
        for name in (name for group in plan.groups for name in group.parameters):
            for kind, value in optimizer.state.get(model.get_parameter(name), {}).items():
                if name not in trained and kind in _MOMENTA and isinstance(value, Tensor):
                    value.zero_()


class NeuronGuard(ChannelGuard):
    """Puts untrained neurons back after each step, and at the end restores their optimiser state.

    Parameters
    ----------
    plan, model, copies :
        See `ChannelGuard`.
    optimizer : torch optimiser, optional
        At the end the momentum of untrained neurons is set to zero, and their other optimiser state to the values
        at the creation of the guard.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        copies: Mapping[str, NDArray[Any]] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        super().__init__(plan, model, copies)
        self._optimizer = optimizer
        self._states = {
            (id(weight), name): value.index_select(0, rows)
            for weight, rows, name, value in self._states_of_rows()
            if name not in _MOMENTA
        }

    @torch.no_grad()
    def put_back(self) -> None:
        """Write the remembered neurons into the weights."""
        super().put_back()
        for weight, rows, name, value in self._states_of_rows():
            # All entries of a vector get a gradient. Momentum of untrained ones must be zero: some policies read
            # it.
            if weight.dim() == 1 and name in _MOMENTA:
                value.index_fill_(0, rows, 0.0)

    @torch.no_grad()
    def finalize(self) -> None:
        """Erase or restore the optimiser's state of untrained neurons; it had no effect during the steps."""
        for weight, rows, name, value in self._states_of_rows():
            before = self._states.get((id(weight), name))
            if before is None:
                # Momentum, or state that did not exist before the first step and began with zeros.
                value.index_fill_(0, rows, 0.0)
            else:
                value.index_copy_(0, rows, before)

    def _states_of_rows(self) -> Iterator[tuple[nn.Parameter, Tensor, str, Tensor]]:
        """Yield the optimiser's state of weights with untrained neurons: weight, these rows, state name, tensor."""
        for weight, rows in self.untrained_rows:
            found = {} if self._optimizer is None else self._optimizer.state.get(weight, {})
            for name, value in found.items():
                if isinstance(value, Tensor) and value.shape == weight.shape:
                    yield weight, rows, name, value
