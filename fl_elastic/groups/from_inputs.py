"""Make a step's loss depend differentiably on the inputs, so that its graph can be followed down to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fl_elastic.errors import TrainingError
from fl_elastic.groups.batch import as_pair, map_tensors
from fl_elastic.groups.forward import Batch, LossFn, compute_loss
from fl_elastic.groups.trainable import trainable

_Sources = set[Any]


def loss_from_inputs(model: nn.Module, loss_fn: LossFn, batch: Batch) -> tuple[Tensor, _Sources]:
    """Return the loss with every floating-point input differentiable, and the nodes that stand for the inputs.

    Integers have no gradient; the outputs of frozen embeddings take their place. Without this, no path would lead
    from adapters above an embedding to the inputs.

    Some models cannot run on differentiable inputs, for example because they pass them to numpy or set
    ``requires_grad`` on them. Such a model gets plain inputs, and its first layers get differentiable ones.
    """
    given, targets = as_pair(batch)
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
    """Let the inputs of the first layers with parameters take the place of the model's inputs."""

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
    """Return a differentiable copy, whose node is added to ``sources``; only for floating-point tensors.

    The copy is not a leaf, so a model may modify its input in place.
    """
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        return tensor
    if not torch.is_grad_enabled():
        # With gradients disabled, as in a part that the model runs under no_grad, a copy would have no node.
        return tensor
    copy = tensor.detach().requires_grad_(True).clone()
    sources.add(copy.grad_fn)
    return copy
