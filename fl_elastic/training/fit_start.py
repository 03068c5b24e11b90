"""Model and optimiser as they were when a fit started, to go back to when it fails."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_elastic.groups.torch_private import own_buffers
from fl_elastic.training.step import KeptOptimizer
from fl_elastic.update import Manifest, weights_of
from fl_elastic.update.manifest import array_of

__all__ = ["FitStart"]


@dataclass(eq=False)
class FitStart:
    """What a fit may change, and how it was before.

    A parameter and the optimiser's state of it are copied when it is about to be trained, so that a frozen one
    costs no memory.

    Attributes
    ----------
    weights : dict of str to array
        The tensors of the manifest that the fit may have changed: buffers, and what was about to be trained.
    """

    model: nn.Module
    manifest: Manifest
    optimizing: KeptOptimizer
    weights: dict[str, NDArray[Any]] = field(init=False)
    _buffers: list[tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]]] = field(init=False)
    _settings: list[dict[str, Any]] = field(init=False)
    _had_state: set[Tensor] = field(init=False)
    _states: dict[Tensor, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kept = self.manifest.index
        # A tied tensor has several names, all of which travel.
        self._names: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), []).append(name)
        self.weights, self._buffers = {}, []
        for prefix, module in self.model.named_modules(remove_duplicate=False):
            own = own_buffers(module)
            values = {}
            for each, buffer in own.items():
                name = f"{prefix}.{each}" if prefix else each
                if buffer is None:
                    continue
                if name in kept:
                    self.weights[name] = array_of(buffer)
                else:
                    values[each] = buffer.detach().clone()
            self._buffers.append((own, dict(own), values))
        parameters = {name for names in self._names.values() for name in names}
        # Where a module's state holds what is neither, that is asked for.
        if others := kept.keys() - parameters - self.weights.keys():
            self.weights |= weights_of(self.model, self.manifest, others)
        made = self.optimizing.made
        self._had_state = set() if made is None else set(made.state)
        self._settings = [] if made is None else [_settings(group) for group in made.param_groups]
        self._existed = made is not None

    def about_to_train(self, parameters: Iterable[nn.Parameter]) -> None:
        """Remember these parameters and the optimiser's state of them, unless they are remembered already."""
        made = self.optimizing.made
        for parameter in parameters:
            for name in self._names[id(parameter)]:
                if name in self.manifest.index and name not in self.weights:
                    self.weights[name] = array_of(parameter)
            if made is not None and parameter in self._had_state and parameter not in self._states:
                self._states[parameter] = _copied(made.state[parameter])

    def restore(self) -> None:
        """Put everything back."""
        for own, names, values in self._buffers:
            own.clear()
            own.update(names)
            with torch.no_grad():
                for name, value in values.items():
                    own[name].copy_(value)
        state, buffers = self.model.state_dict(), dict(self.model.named_buffers())
        with torch.no_grad():
            for name, before in self.weights.items():
                if state[name].shape != before.shape:
                    # A buffer that grew, which its alias in the state does not shrink.
                    buffers[name].data = torch.as_tensor(before).to(buffers[name]).clone()
                else:
                    state[name].copy_(torch.as_tensor(before))
        for parameter in self.model.parameters():
            parameter.grad = None
        made = self.optimizing.made
        if made is None:
            return
        if not self._existed:
            self.optimizing.made = None
            return
        for tensor in [each for each in made.state if each not in self._had_state]:
            del made.state[tensor]
        for tensor, state in self._states.items():
            made.state[tensor] = state
        for group, settings in zip(made.param_groups, self._settings, strict=False):
            group.update(settings)


def _copied(value: Any) -> Any:
    """Return a copy; of plain tensors by their own means, which a deep copy takes three times as long for."""
    if type(value) is dict:
        return {name: _copied(each) for name, each in value.items()}
    return value.detach().clone() if type(value) is Tensor else deepcopy(value)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of one of an optimiser's parameter groups, without its parameters."""
    return {name: deepcopy(value) for name, value in group.items() if name != "params"}
