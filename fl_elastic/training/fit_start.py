"""Model and optimiser as they were when a fit started; `ElasticTrainer.fit` restores them when it fails."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_elastic.errors import TrainingError
from fl_elastic.groups.held_state import Attributes, content_of, followers, put_content_back
from fl_elastic.groups.model_state import ModelState
from fl_elastic.groups.torch_private import has_gradient_hooks, own_buffers, writes_to
from fl_elastic.optimizers import KeptOptimizer, moves_by_gradient, parts_of
from fl_elastic.update import Manifest
from fl_elastic.update.manifest import array_of

_LOG = logging.getLogger("fl_elastic")


class FitStart:
    """Copies of all that a fit may change, made before it is changed.

    A parameter and its optimiser state are copied when the parameter is about to be trained, so that a frozen one
    costs no memory; `followers` are copied at once.

    Parameters
    ----------
    model : nn.Module
        The model to be trained.
    manifest : Manifest
        Manifest of the tensors that travel.
    optimizing : KeptOptimizer
        Its optimiser.

    Attributes
    ----------
    manifest : Manifest
        As given.
    weights : dict of str to array
        The tensors of the manifest that the fit may have changed, by their names in the state: buffers, followers,
        and parameters about to be trained.
    followers : dict of str to Parameter
        The model's followers (`fl_elastic.groups`), by the names that their modules give them.
    """

    def __init__(self, model: nn.Module, manifest: Manifest, optimizing: KeptOptimizer) -> None:
        self.manifest = manifest
        self._model = model
        self._state = ModelState.of(model)
        names_of, index = self._state.names, manifest.index
        self._attributes, found = Attributes.of(model), followers(model)
        # Listed once: torch walks all modules for each listing.
        self._named = list(model.named_parameters(remove_duplicate=False))
        parameters = {id(parameter) for _, parameter in self._named}
        sent = {key for key, names in names_of.items() if any(name in index for name in names)}
        buffers = model.named_buffers(remove_duplicate=False)
        self._travelling = {
            name for name, parameter in (*self._named, *buffers) if id(parameter) in sent
        }
        # A tied tensor has several names, all of which travel. A state may also hold tensors that are neither
        # parameters nor buffers.
        self.weights = {
            name: array_of(tensor)
            for name, tensor in self._state.tensors.items()
            if name in index and id(tensor) not in parameters
        }
        following = {id(each) for each in found}
        first_names = {id(parameter): name for name, parameter in reversed(self._named)}
        self.followers = {first_names[id(each)]: each for each in found}
        # Torch counts writes by its own operations; a replacement of the data shows in its address.
        self._written = {
            name: (parameter, writes_to(parameter), parameter.data_ptr())
            for name, parameter in self._named
            if id(parameter) not in following
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
        optimizer = optimizing()
        self._moves_by_gradient = moves_by_gradient(optimizer)
        self._optimizers = [_Optimizer(part) for part in parts_of(optimizer)]
        if self.followers:
            self.about_to_train(self.followers.values())

    def about_to_train(self, parameters: Iterable[nn.Parameter]) -> None:
        """Copy these parameters and their optimiser state, unless they are copied already."""
        for parameter in parameters:
            if id(parameter) not in self._parameters:
                value = array_of(parameter)
                self._parameters[id(parameter)] = parameter, value
                for name in self._state.names.get(id(parameter), ()):
                    if name in self.manifest.index:
                        self.weights[name] = value
            for optimizer in self._optimizers:
                optimizer.about_to_train(parameter)

    def before(self, parameter: nn.Parameter) -> NDArray[Any]:
        """Return a parameter's value from before it was trained."""
        return self._parameters[id(parameter)][1]

    def unmoved(self, but: Collection[str]) -> dict[str, NDArray[Any]]:
        """Return the copied values of parameters by the names that modules give them, except those in ``but``."""
        return {
            name: self._parameters[id(parameter)][1]
            for name, parameter in self._named
            if id(parameter) in self._parameters and name not in but
        }

    def travels(self, name: str) -> bool:
        """Return whether a parameter or buffer is in the manifest, by the name that its module gives it.

        The answer does not change if the model replaces the tensor of a buffer meanwhile.
        """
        return name in self._travelling

    def check_moves(self, stepped: Collection[str]) -> None:
        """Warn of parameters that the forward pass has written to although no step trains them.

        Raises
        ------
        TrainingError
            If hooks have changed a trained parameter that is not in ``stepped``.
        """
        for name, parameter in self._named:
            if (
                name not in stepped
                and id(parameter) in self._parameters
                and has_gradient_hooks(parameter)
                and not np.array_equal(self._parameters[id(parameter)][1], array_of(parameter))
            ):
                raise TrainingError(
                    f"{name!r} was changed in the backward pass and not by optimizer.step(), as by an optimiser "
                    "that steps in hooks, which plans and updates cannot follow: let optimizer_fn make the "
                    "optimiser"
                )
        if not self._moves_by_gradient:
            return
        for name, (each, count, place) in self._written.items():
            trained = id(each) in self._parameters
            if not trained and (writes_to(each), each.data_ptr()) != (count, place):
                _LOG.warning(
                    "the forward pass has changed %r, which no step trains: the update does not hold it. Keep it "
                    "as a buffer, or train it", name,
                )  # fmt: skip
                break

    def restore(self) -> None:
        """Restore model and optimiser."""
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
        for optimizer in self._optimizers:
            optimizer.restore()


class _Optimizer:
    """A copy of one optimiser's state and settings, without the optimisers that it wraps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._had_state = set(getattr(optimizer, "state", ()))
        self._settings = [
            {name: deepcopy(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        self._states: dict[Tensor, Any] = {}
        # The steps of an optimiser that is not torch's may depend on any of its attributes.
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
    """Return a copy of a value; plain tensors are cloned, because deep copies of them take three times as long."""
    if type(value) is dict:
        return {name: _copied(each) for name, each in value.items()}
    return value.detach().clone() if type(value) is Tensor else deepcopy(value)
