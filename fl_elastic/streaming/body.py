"""The form in which samples are kept and trained on: inputs of the whole model, or features for its upper part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_elastic.errors import ModelError, TrainingError
from fl_elastic.groups.forward import call_model
from fl_elastic.groups.model_state import refuse_unshaped
from fl_elastic.profiling.profile import model_device
from fl_elastic.training.feature_codec import fingerprint
from fl_elastic.training.last_layer import COMPUTED, NOT_LINEAR, calls_of

Prepare = Callable[[Tensor], Tensor]
Look = tuple[NDArray[Any], NDArray[np.float32]]


def as_floats(inputs: Tensor) -> Tensor:
    """Return floating inputs in single precision, others (such as token ids) unchanged."""
    return inputs.float() if inputs.is_floating_point() else inputs


def scores_of(outputs: Any) -> Tensor:
    """Return the class scores of a batch, shape (B, C); raise ModelError if the outputs have another form."""
    if not isinstance(outputs, Tensor) or outputs.ndim != 2:
        seen = f"shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs)
        raise ModelError(
            f"a stream needs a model that puts out one table of class scores, not {seen}"
        )
    return outputs


class Body(ABC):
    """The part of a model that is trained, and the form in which it takes samples."""

    module: nn.Module
    version: str | None = None

    def look(self, x: NDArray[Any]) -> Look:
        """Return the kept form of one sample and its class scores; see `looks`."""
        kept, scores = self.looks(x[None])
        return kept[0], scores[0]

    @abstractmethod
    def looks(self, xs: NDArray[Any]) -> Look:
        """Return the kept form of each sample of a batch, and their class scores.

        Raises
        ------
        ModelError
            If the model does not return class scores.
        RuntimeError, ValueError, TypeError, IndexError
            If the model does not accept the samples.
        """

    @abstractmethod
    def as_inputs(self, kept: NDArray[Any]) -> Tensor:
        """Return the input of `module` for a batch of kept samples."""

    def close(self) -> None:  # noqa: B027
        """Restore the model to an ordinary one."""


class Upper(Body):
    """The part of a model above a place, which takes the features at this place; the part below is frozen.

    Attributes
    ----------
    place : str
        The module at which the frozen part ends, or whose inputs are the features.
    frozen : tuple of str
        Names of the tensors on which the features depend.
    kind : torch.dtype
        Type of the features, which are kept in single precision.
    """

    place: str
    frozen: tuple[str, ...]
    kind: torch.dtype

    def __init__(self, model: nn.Module, prepare: Prepare) -> None:
        self._model, self._prepare = model, prepare

    def by_its_names(self) -> nn.Module:
        """Return the upper part, callable like `module`, with its tensors under their names in the whole model."""
        return _AsTheWhole(self._model, self.module)

    def as_inputs(self, kept: NDArray[Any]) -> Tensor:
        """Return the features."""
        features = torch.from_numpy(np.asarray(kept, np.float32))
        return features.to(model_device(self._model), self.kind)

    def prepared(self, xs: NDArray[Any]) -> Tensor:
        """Return the whole model's input for a batch of samples."""
        return self._prepare(torch.from_numpy(xs).to(model_device(self._model)))


class _AsTheWhole(nn.Module):
    """A module with the submodules and tensors of a model that calls another module in its place."""

    def __init__(self, model: nn.Module, called: nn.Module) -> None:
        super().__init__()
        kept = model.state_dict(keep_vars=True)
        for name, parameter in model.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in model.named_buffers(recurse=False):
            self.register_buffer(name, buffer, persistent=name in kept)
        for name, child in model.named_children():
            self.add_module(name, child)
        # Not registered as a submodule, so that no tensor appears under a second name.
        self.__dict__["_called"] = called

    def forward(self, features: Tensor) -> Any:
        """Return the model's outputs."""
        return self.__dict__["_called"](features)


class WholeModel(Body):
    """Trains the model itself, on inputs as they arrive.

    Parameters
    ----------
    model : nn.Module
        Returns class scores.
    prepare : callable
        Turns a batch of samples into the model's input, each time it is used: for example a change of scale or
        type, or a random augmentation for training.
    """

    def __init__(self, model: nn.Module, prepare: Prepare = as_floats) -> None:
        self.module = model
        self._prepare = prepare

    def looks(self, xs: NDArray[Any]) -> Look:
        """Return the samples themselves and their class scores."""
        with torch.no_grad():
            scores = scores_of(call_model(self.module, self.as_inputs(xs)))
        return xs, scores.float().cpu().numpy()

    def as_inputs(self, kept: NDArray[Any]) -> Tensor:
        """Return the batch, prepared."""
        return self._prepare(torch.from_numpy(kept).to(model_device(self.module)))


class LastLayerBody(Upper):
    """The layer that returns the class scores; everything below it is frozen, and there may be nothing below it.

    Parameters
    ----------
    model : nn.Module
        The whole model; it can still be called as usual.
    head : str
        Name of the layer.
    prepare : callable
        See `WholeModel`; it must not be random here, since features are computed once.

    Raises
    ------
    ModelError
        If this is not a linear layer with a bias, or its weight is tied to another layer or computed from other
        parameters.

    Examples
    --------
    >>> import numpy as np
    >>> body = LastLayerBody(nn.Sequential(nn.ReLU(), nn.Linear(2, 3)), "1")
    >>> features, scores = body.looks(np.array([[1.0, -1.0]], np.float32))
    >>> features.tolist(), scores.shape
    ([[1.0, 0.0]], (1, 3))
    """

    module: nn.Linear

    def __init__(self, model: nn.Module, head: str, prepare: Prepare = as_floats) -> None:
        layer = model.get_submodule(head)
        if not isinstance(layer, nn.Linear) or layer.bias is None:
            raise ModelError(
                f"a head in closed form goes into a linear layer with a bias, and {head!r} is {layer}: end the "
                "model with one"
            )
        own = [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]
        if own.count(id(layer.weight)) > 1:
            raise ModelError(
                f"the weight of {head!r} is tied to another layer, so no head in closed form can go there"
            )
        if not {id(layer.weight), id(layer.bias)} <= {*own}:
            raise ModelError(COMPUTED)
        refuse_unshaped(model)
        super().__init__(model, prepare)
        self.module, self.place, self.kind = layer, head, layer.weight.dtype
        tensors = model.state_dict(keep_vars=True) | dict(model.named_buffers())
        below = {n: tensor for n, tensor in tensors.items() if not n.startswith(f"{head}.")}
        self.frozen = tuple(name for name in model.state_dict() if name in below)
        # Short, since every stored sample has a copy.
        self.version = fingerprint([], f"{head}/input", sorted(below.items())).hex()[:16]

    def looks(self, xs: NDArray[Any]) -> Look:
        """Return the layer's inputs and the class scores.

        Raises
        ------
        ModelError
            If the scores are not the output of this layer.
        TrainingError
            If the layer's input is not finite.
        """
        inputs = self.prepared(xs)
        with torch.no_grad(), calls_of([self.module]) as seen:
            scores = scores_of(call_model(self._model, inputs))
            call = next((each for each in seen if each.is_whole(scores)), None)
            if call is None:
                raise ModelError(
                    f"a head in closed form goes into the layer that gives the class scores, which {self.place!r} "
                    "does not: end the model with a linear layer"
                )
            if not call.linear:
                raise ModelError(NOT_LINEAR)
        features = call.given
        if not torch.isfinite(features).all():
            raise TrainingError("the input of its last layer is not finite")
        return features.float().cpu().numpy(), call.out.float().cpu().numpy()
