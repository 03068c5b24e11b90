"""The last linear layer of a model and its input: all that a head in closed form depends on."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn

from fl_elastic.errors import ModelError, TrainingError
from fl_elastic.groups.forward import call_model
from fl_elastic.groups.model_state import refuse_unshaped
from fl_elastic.streaming.body import Look, Prepare, Upper, as_floats, scores_of
from fl_elastic.training.feature_codec import fingerprint
from fl_elastic.training.last_layer import COMPUTED, NOT_LINEAR, calls_of


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
        own = [id(each) for _, each in model.named_parameters(remove_duplicate=False)]
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
        below = {n: each for n, each in tensors.items() if not n.startswith(f"{head}.")}
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
            call = next((each for each in seen if each.gives(scores)), None)
            if call is None:
                raise ModelError(
                    f"a head in closed form goes into the layer that gives the class scores, which {self.place!r} "
                    "does not: end the model with a linear layer"
                )
            if not call.linear:
                raise ModelError(NOT_LINEAR)
        features = call.given
        if not torch.isfinite(features).all():
            raise TrainingError("what enters its last layer is not finite")
        return features.float().cpu().numpy(), scores.float().cpu().numpy()
