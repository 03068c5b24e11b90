"""What goes into every convolution of one step, and the error gradient that comes back to its output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn

from fl_elastic.errors import TrainingError
from fl_elastic.groups import Batch, LossFn, compute_loss, untouched

__all__ = ["Visit", "visit_layers"]

Visit: TypeAlias = Callable[[int, nn.Module, Tensor, Tensor], None]


def visit_layers(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Batch,
    layers: Mapping[int, nn.Module],
    visit: Visit,
) -> None:
    """Run one step and call ``visit(key, layer, input, output_gradient)`` for each call of a layer, loss first.

    The tensors are detached; each call's input is let go after its visit. Weights, buffers, gradients and RNG are
    left as they were.

    Raises
    ------
    TrainingError
        If the loss is not finite.
    """
    entered: list[Tensor] = []
    handles = []

    def listen(key: int, layer: nn.Module) -> None:
        def entering(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            entered.append(arguments[0].detach().clone())

        def leaving(_: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> None:
            # Of this call: another batch than the traced one may come by a layer several times.
            given = [entered.pop()]
            if output.requires_grad:
                output.register_hook(  # type: ignore[no-untyped-call]
                    lambda gradient: came_back(key, layer, given, gradient)
                )

        handles.append(layer.register_forward_pre_hook(entering))
        handles.append(layer.register_forward_hook(leaving))

    def came_back(key: int, layer: nn.Module, given: list[Tensor], gradient: Tensor) -> None:
        with torch.enable_grad():
            visit(key, layer, given.pop(), gradient.detach())

    for key, layer in layers.items():
        listen(key, layer)
    try:
        with untouched(model):
            loss = compute_loss(model, loss_fn, batch)
            if not torch.isfinite(loss):
                raise TrainingError(f"the loss on a probe batch is {loss.item()}: check it for NaN")
            loss.backward()  # type: ignore[no-untyped-call]
    finally:
        for handle in handles:
            handle.remove()
