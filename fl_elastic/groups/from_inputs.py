"""Make a step's loss depend on the inputs, so that the backward graph can be followed down to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fl_elastic.errors import TrainingError
from fl_elastic.groups.forward import Batch, LossFn, compute_loss, map_tensors, split_batch
from fl_elastic.groups.trainable import trainable

__all__ = ["loss_from_inputs"]

_Sources = set[Any]


def loss_from_inputs(model: nn.Module, loss_fn: LossFn, batch: Batch) -> tuple[Tensor, _Sources]:
    """Return the loss with every floating input differentiable, and the nodes that stand for the inputs.

    Integers have no gradient: what a frozen embedding makes of them takes their place. Without it no path would
    lead from the input of adapters above to the loss.

    A model that cannot work on differentiable inputs, as one that hands them to numpy or sets their
    ``requires_grad`` itself, gets plain ones, and its layers what they are given in a differentiable form.
    """
    given, targets = split_batch(batch)
    sources: _Sources = set()
    inputs = map_tensors(lambda tensor: _differentiable(tensor, sources), given)
    with torch.enable_grad():
        try:
            with _from_frozen_embeddings(model, sources):
                return compute_loss(model, loss_fn, (inputs, targets)), sources
        except TrainingError:
            sources.clear()
            with _from_frozen_embeddings(model, sources), _from_layers(model, sources):
                return compute_loss(model, loss_fn, batch), sources


@contextmanager
def _from_frozen_embeddings(model: nn.Module, sources: _Sources) -> Iterator[None]:
    hooks = [
        module.register_forward_hook(lambda _, __, out: _differentiable(out, sources))
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and not trainable(module.weight)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _from_layers(model: nn.Module, sources: _Sources) -> Iterator[None]:
    """Let the first layers that have parameters take the place of the inputs."""

    def taken(tensor: Tensor) -> Tensor:
        parameter = isinstance(tensor, nn.Parameter)
        return (
            tensor if tensor.grad_fn is not None or parameter else _differentiable(tensor, sources)
        )

    hooks = [
        module.register_forward_pre_hook(
            lambda _, given, named: (map_tensors(taken, given), map_tensors(taken, named)),
            with_kwargs=True,
        )
        for module in model.modules()
        if [*module.parameters()] and not [*module.children()]
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _differentiable(tensor: Any, sources: _Sources) -> Any:
    """Return a copy with a gradient, whose node is added to ``sources``; anything but floating tensors as it is.

    The copy is no leaf, so a model may modify its input in place.
    """
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        return tensor
    if not torch.is_grad_enabled():
        # The model runs this part without gradients, so no copy would have a node.
        return tensor
    copy = tensor.detach().requires_grad_(True).clone()
    sources.add(copy.grad_fn)
    return copy
