"""Model and optimiser as they were when a fit started: `ElasticTrainer.fit` goes back to them when it fails."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_elastic.groups.held_state import Attributes, content_of, followers, put_content_back
from fl_elastic.groups.model_state import ModelState
from fl_elastic.groups.torch_private import own_buffers, writes_to
from fl_elastic.profiling.optimizers import moves_by_gradient, parts_of
from fl_elastic.training.step import KeptOptimizer
from fl_elastic.update import Manifest
from fl_elastic.update.manifest import array_of

__all__ = ["FitStart"]


class FitStart:
    """What a fit may change, and how it was before.

    A parameter and the optimiser's state of it are copied when it is about to be trained, so that a frozen one
    costs no memory; `followers` are copied at once.

    Parameters
    ----------
    model : nn.Module
        About to be trained.
    manifest : Manifest
        What of it travels.
    optimizing : KeptOptimizer
        Whose optimiser trains it.

    Attributes
    ----------
    manifest : Manifest
        As given.
    weights : dict of str to array
        The tensors of the manifest that the fit may have changed, by their names in the state: buffers, followers,
        and what was about to be trained.
    followers : dict of str to Parameter
        Those of the model by the names that modules have for them.
    """

    def __init__(self, model: nn.Module, manifest: Manifest, optimizing: KeptOptimizer) -> None:
        self.manifest = manifest
        self._model = model
        self._state = ModelState.of(model)
        self._attributes = Attributes.of(model)
        # Asked for once: torch walks all modules for each look.
        self._named = list(model.named_parameters(remove_duplicate=False))
        parameters = {id(each) for _, each in self._named}
        sent = {
            key
            for key, names in self._state.names.items()
            if any(name in manifest.index for name in names)
        }
        buffers = model.named_buffers(remove_duplicate=False)
        self._travelling = {name for name, each in (*self._named, *buffers) if id(each) in sent}
        # A tied tensor has several names, all of which travel. A state may hold what is neither a parameter
        # nor a buffer.
        self.weights = {
            name: array_of(each)
            for name, each in self._state.tensors.items()
            if name in manifest.index and id(each) not in parameters
        }
        self._buffers: list[tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]]] = []
        for prefix, module in model.named_modules():
            own = own_buffers(module)
            start = f"{prefix}." if prefix else ""
            values = {
                name: buffer.detach().clone()
                for name, buffer in own.items()
                if buffer is not None and not self.travels(start + name)
            }
            self._buffers.append((own, dict(own), values))
        self._parameters: dict[int, tuple[nn.Parameter, NDArray[Any]]] = {}
        self._optimizers = [_Optimizer(each) for each in parts_of(optimizing())]
        found = followers(model)
        following = {id(each) for each in found}
        first_names = {id(each): name for name, each in reversed(self._named)}
        self.followers = {first_names[id(each)]: each for each in found}
        # Counted by torch for whoever writes by its operations, and another place for who exchanges the data.
        self._written = {
            name: (each, writes_to(each), each.data_ptr())
            for name, each in self._named
            if id(each) not in following
        }
        if self.followers:
            self.about_to_train(self.followers.values())

    def about_to_train(self, parameters: Iterable[nn.Parameter]) -> None:
        """Remember these parameters and the optimiser's state of them, unless they are remembered already."""
        for parameter in parameters:
            if id(parameter) not in self._parameters:
                value = array_of(parameter)
                self._parameters[id(parameter)] = parameter, value
                for name in self._state.names.get(id(parameter), ()):
                    if name in self.manifest.index:
                        self.weights[name] = value
            for each in self._optimizers:
                each.about_to_train(parameter)

    def before(self, parameter: nn.Parameter) -> NDArray[Any]:
        """Return the value of a parameter when it was about to be trained."""
        return self._parameters[id(parameter)][1]

    def unmoved(self, but: Collection[str]) -> dict[str, NDArray[Any]]:
        """Return the remembered values of parameters by the names that modules have for them, but for some."""
        return {
            name: self._parameters[id(each)][1]
            for name, each in self._named
            if id(each) in self._parameters and name not in but
        }

    def travels(self, name: str) -> bool:
        """Return whether a parameter or buffer, by the name that its module has for it, is one of the manifest's.

        A model may put another tensor in the place of a buffer meanwhile.
        """
        return name in self._travelling

    def moved_by_themselves(self) -> list[str]:
        """Return the parameters that somebody has written and that were neither trained nor copied, by name."""
        return [
            name
            for name, (each, count, place) in self._written.items()
            if id(each) not in self._parameters
            and (writes_to(each), each.data_ptr()) != (count, place)
        ]

    def restore(self) -> None:
        """Put everything back."""
        for own, names, values in self._buffers:
            own.clear()
            own.update(names)
            with torch.no_grad():
                for name, value in values.items():
                    own[name].copy_(value)
        self._attributes.put_back()
        known = {id(each) for each in self._model.parameters()}
        others = {
            name: torch.as_tensor(before)
            for name, before in self.weights.items()
            if id(self._state.tensors[name]) not in known
        }
        for name, value in others.items():
            live = self._state.tensors[name]
            if live.shape != value.shape:
                # A buffer that grew.
                live.data = value.to(live).clone()
        self._state.load(others)
        with torch.no_grad():
            for parameter, array in self._parameters.values():
                parameter.copy_(torch.as_tensor(array))
        for parameter in self._model.parameters():
            parameter.grad = None
        for each in self._optimizers:
            each.restore()


class _Optimizer:
    """An optimiser as it was, without those that it wraps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._had_state = set(getattr(optimizer, "state", ()))
        self._settings = [_settings(group) for group in optimizer.param_groups]
        self._states: dict[Tensor, Any] = {}
        # Of others than torch's it is not known what else their steps go by.
        self._content: dict[str, tuple[Any, Any]] = {}
        if not moves_by_gradient(optimizer):
            self._content = {
                name: (value, content_of(value))
                for name, value in vars(optimizer).items()
                if name not in ("state", "param_groups")
            }
            for parameter in self._had_state:
                self.about_to_train(parameter)

    def about_to_train(self, parameter: Tensor) -> None:
        if parameter in self._had_state and parameter not in self._states:
            self._states[parameter] = _copied(self._optimizer.state[parameter])

    def restore(self) -> None:
        state = getattr(self._optimizer, "state", {})
        for tensor in [each for each in state if each not in self._had_state]:
            del state[tensor]
        for tensor, known in self._states.items():
            state[tensor] = known
        for group, settings in zip(self._optimizer.param_groups, self._settings, strict=False):
            group.update(settings)
        own = vars(self._optimizer)
        for name, (value, content) in self._content.items():
            own[name] = value
            put_content_back(value, content)


def _copied(value: Any) -> Any:
    """Return a copy; of plain tensors by their own means, which a deep copy takes three times as long for."""
    if type(value) is dict:
        return {name: _copied(each) for name, each in value.items()}
    return value.detach().clone() if type(value) is Tensor else deepcopy(value)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of one of an optimiser's parameter groups, without its parameters."""
    return {name: deepcopy(value) for name, value in group.items() if name != "params"}
