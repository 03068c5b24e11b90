"""Latent replay: the lower part of the model is frozen permanently, and the store keeps its outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_elastic.errors import ModelError, StreamError
from fl_elastic.given import whole
from fl_elastic.groups import LossFn
from fl_elastic.groups.graph import Cut
from fl_elastic.groups.trace import trace_step
from fl_elastic.groups.trainable import forget_flags, note_flags
from fl_elastic.groups.untouched import untouched
from fl_elastic.ops.split import SplitModel
from fl_elastic.streaming.body import Look, Prepare, Upper, as_floats, scores_of
from fl_elastic.training.feature_codec import fingerprint


@dataclass(frozen=True)
class Latent:
    """Setting of latent replay: where the frozen part ends.

    Parameters
    ----------
    groups : int
        Smallest number of tensor groups above the cut, counted from the output. The cut is at the nearest place
        where the rest of the model depends on a single tensor.
    """

    groups: int

    def __post_init__(self) -> None:
        if (whole(self.groups) or 0) < 1:
            raise StreamError(f"{self.groups!r} groups above the frozen part: give at least 1")

    def cut(self, model: nn.Module, loss_fn: LossFn, inputs: Tensor) -> tuple[Any, Cut]:
        """Return the graph of a training step and the cut in it.

        Raises
        ------
        ModelError
            If there is no such place.
        """
        with untouched(model), torch.enable_grad():
            # All parameters count as trainable, including those frozen before a restart.
            model.requires_grad_(True)
            # Two samples, since BatchNorm does not accept a single one in training.
            two = inputs[:1].repeat(2, *[1] * (inputs.dim() - 1))
            targets = torch.zeros(2, dtype=torch.long, device=inputs.device)
            graph = trace_step(model, loss_fn, (two, targets)).graph
        cut = graph.cut_below(self.groups - 1)
        if cut is None:
            places = [str(each.groups_above) for each in graph.cuts]
            raise ModelError(
                f"no frozen part ends below the first {self.groups} of {len(graph.groups)} groups: "
                f"the model can be cut below {', '.join(places) or 'none'}"
            )
        return graph, cut


class UpperPart(Upper):
    """Trains the part above a cut, on the features at the cut.

    Parameters
    ----------
    model : nn.Module
        Its lower part is frozen and put into eval mode; the model can still be called as usual.
    latent : Latent
        Where the cut is.
    loss_fn : callable
        ``loss_fn(outputs, targets)`` of class scores and output indices.
    example : array
        One sample.
    prepare : callable
        See `WholeModel`; it must not be random here, since features are computed once.

    Raises
    ------
    ModelError
        If the model cannot be cut there.
    """

    def __init__(
        self,
        model: nn.Module,
        latent: Latent,
        loss_fn: LossFn,
        example: NDArray[Any],
        prepare: Prepare = as_floats,
    ) -> None:
        super().__init__(model, prepare)
        inputs = self.prepared(example[None])
        graph, cut = latent.cut(model, loss_fn, inputs)
        self._split = SplitModel(model, graph, cut)
        prefix = self._split.prefix_modules
        place = f"{cut.module}/{'input' if cut.at_input else 'output'}"
        # Short, since every stored sample has a copy.
        self.version = fingerprint(prefix, place, self._split.loose_tensors).hex()[:16]
        parameters = [tensor for module in prefix for tensor in module.parameters()]
        self.place = cut.module
        frozen = {id(tensor) for _, tensor in self._split.loose_tensors} | {
            id(tensor) for module in prefix for tensor in (*module.parameters(), *module.buffers())
        }
        self.frozen = tuple(
            name
            for name, tensor in model.state_dict(keep_vars=True).items()
            if id(tensor) in frozen
        )
        self._trainable = [(each, each.requires_grad) for each in parameters]
        self._noted = note_flags(parameters)
        for parameter in parameters:
            parameter.requires_grad_(False)
        self._split.__enter__()
        try:
            self._split.check(inputs)
            self.kind = self._split.features(inputs).dtype
        except ModelError:
            self.close()
            raise
        self.module = _FromCut(model, lambda features: self._above(features, inputs))

    def looks(self, xs: NDArray[Any]) -> Look:
        """Return the samples' features and their class scores."""
        inputs = self.prepared(xs)
        features = self._split.features(inputs)
        with torch.no_grad():
            scores = scores_of(self._split.outputs(inputs, features))
        return features.float().cpu().numpy(), scores.float().cpu().numpy()

    def close(self) -> None:
        """Make the model run as a whole again."""
        self._split.__exit__(None, None, None)
        for parameter, trainable in self._trainable:
            parameter.requires_grad_(trainable)
        forget_flags(self._noted)
        self._noted = []

    def _above(self, features: Tensor, inputs: Tensor) -> Any:
        # Only the batch size of the inputs matters: nothing is computed from their values.
        shape = (len(features), *inputs.shape[1:])
        return self._split.outputs(inputs.expand(shape), features)


class _FromCut(nn.Module):
    """The model, called with features instead of inputs."""

    def __init__(self, model: nn.Module, run: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.model = model
        self._run = run

    def forward(self, features: Tensor) -> Any:
        """Return the model's outputs."""
        return self._run(features)
