"""Layers that train some of their neurons: the optimiser sees zero gradients for the others."""

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

__all__ = ["NeuronGuard", "NeuronLayers"]

# By the names that torch's optimisers give them: which way a weight went.
_MOMENTA = ("momentum_buffer", "exp_avg")


@dataclass(frozen=True)
class NeuronLayers(LeanLayers):
    """Lean layers after which the optimiser has no momentum of what did not train: it starts anew once thawed."""

    def guard(
        self,
        model: nn.Module,
        plan: Plan,
        copies: Mapping[str, NDArray[Any]] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> NeuronGuard:
        """Return what puts neurons back that are not trained."""
        return NeuronGuard(plan, model, copies, optimizer)

    @torch.no_grad()
    def finished(self, model: nn.Module, plan: Plan, optimizer: torch.optim.Optimizer) -> None:
        """Set the momentum of parameters to zero of which nothing trained."""
        trained = set(plan.trained_parameters)
        for name in (name for group in plan.groups for name in group.parameters):
            for kind, value in optimizer.state.get(model.get_parameter(name), {}).items():
                if name not in trained and kind in _MOMENTA and isinstance(value, Tensor):
                    value.zero_()


class NeuronGuard(ChannelGuard):
    """Puts untrained neurons back after each step, and in the end what the optimiser holds of them.

    Parameters
    ----------
    plan, model, copies :
        See `ChannelGuard`.
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
            # Vectors have whole gradients: who reads the momentum of each step is not to find those.
            if weight.dim() == 1 and name in _MOMENTA:
                value.index_fill_(0, rows, 0.0)

    @torch.no_grad()
    def finalize(self) -> None:
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
        for weight, rows in self.untrained_rows:
            found = {} if self._optimizer is None else self._optimizer.state.get(weight, {})
            for name, value in found.items():
                if isinstance(value, Tensor) and value.shape == weight.shape:
                    yield weight, rows, name, value
