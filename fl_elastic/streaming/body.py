"""The form in which samples are kept and trained on: inputs of the whole model, or features for its upper part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_elastic.errors import ModelError
from fl_elastic.groups.forward import call_model
from fl_elastic.profiling.profile import model_device

Prepare = Callable[[Tensor], Tensor]
Look = tuple[NDArray[Any], NDArray[np.float32]]


def as_floats(inputs: Tensor) -> Tensor:
    """Return floating inputs in single precision, others (such as token ids) unchanged."""
    return inputs.float() if inputs.is_floating_point() else inputs


def scores_of(outputs: Any) -> Tensor:
    """Return the class scores of a batch, shape (B, C); ModelError if the outputs have another form."""
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
    """The part of a model above a place, which takes the features there; the part below is frozen.

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
