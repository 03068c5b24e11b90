"""How much of the exact gradient each cheaper mode keeps, measured on a probe batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_elastic.errors import DivergedError
from fl_elastic.groups import Batch, LossFn, Mode
from fl_elastic.groups.forward import compute_loss
from fl_elastic.groups.graph import BackwardGraph
from fl_elastic.groups.trainable import flags_kept
from fl_elastic.groups.untouched import untouched
from fl_elastic.ops.lean_forward import lean_forward
from fl_elastic.ops.lean_kind import convolution_module

Visit: TypeAlias = Callable[[int, nn.Module, Tensor, Tensor], None]


@dataclass(frozen=True, eq=False)
class Fidelity:
    """Cosines between the weights' gradients of a mode and the exact ones, layer by layer.

    Each mode's gradient is computed from the layer's exact input and output gradient.

    Attributes
    ----------
    modes : tuple of Mode
        The K modes.
    weights : array, shape (N, K)
        Cosine for each layer and mode; NaN if a mode does not apply.
    """

    modes: tuple[Mode, ...]
    weights: NDArray[np.float64]


def measure_fidelity(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Batch,
    graph: BackwardGraph,
    modes: Sequence[Mode],
) -> Fidelity:
    """Compare every mode of every two-dimensional convolution with the exact gradient on one batch.

    A channel mode trains the channels with the largest gradient norm on this batch, so its squared cosine is their
    share of the squared norm of the whole gradient.
    """
    layers = {
        group: module
        for group in range(len(graph.groups))
        if (module := convolution_module(graph, model, group)) is not None
    }
    weights = np.full((len(graph.groups), len(modes)), np.nan)

    def visit(group: int, layer: nn.Module, given: Tensor, gradient: Tensor) -> None:
        assert isinstance(layer, nn.Conv2d)
        # In mixed precision activations have fewer bits than the weights.
        given, gradient = given.to(layer.weight.dtype), gradient.to(layer.weight.dtype)
        exact = _gradient(layer, layer.forward, given, gradient)
        for column, mode in enumerate(modes):
            seen = _in_mode(layer, mode, exact, given, gradient)
            if seen is not None:
                weights[group, column] = gradient_cosine(seen, exact)

    visit_layers(model, loss_fn, batch, layers, visit)
    return Fidelity(tuple(modes), weights)


def gradient_cosine(one: Tensor, other: Tensor) -> float:
    """Return the cosine of two gradients of the same shape; 0 if either is zero."""
    norms = float(one.norm() * other.norm())
    return float((one * other).sum()) / norms if norms > 0 else 0.0


def _in_mode(
    layer: nn.Conv2d, mode: Mode, exact: Tensor, given: Tensor, gradient: Tensor
) -> Tensor | None:
    if mode.kind not in ("channels", "filtered"):
        return None
    whole = layer.in_channels if mode.axis == "in" else layer.out_channels
    if mode.kind == "channels" and (
        layer.groups not in (1, layer.in_channels) or mode.channel_count(whole) == whole
    ):
        return None
    channels = _largest_channels(layer, exact, mode) if mode.kind == "channels" else None
    forward = lean_forward(layer, mode, channels)
    return None if forward is None else _gradient(layer, forward, given, gradient)


def _largest_channels(layer: nn.Conv2d, exact: Tensor, mode: Mode) -> list[int]:
    axis = 0 if mode.axis != "in" or layer.groups > 1 else 1
    others = [dimension for dimension in range(exact.dim()) if dimension != axis]
    norms = exact.square().sum(others)
    return sorted(norms.topk(mode.channel_count(len(norms))).indices.tolist())


def _gradient(layer: nn.Conv2d, forward: object, given: Tensor, gradient: Tensor) -> Tensor:
    with flags_kept(layer.parameters()):
        layer.weight.requires_grad_(True)
        output = forward(given.detach())  # type: ignore[operator]
        found: Tensor = torch.autograd.grad(output, layer.weight, gradient)[0]
    return found


def visit_layers(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Batch,
    layers: Mapping[int, nn.Module],
    visit: Visit,
) -> None:
    """Run one step and call ``visit(key, layer, input, output_gradient)`` for each layer call, from the loss on.

    The tensors are detached; a call's input is released after its visit. Weights, buffers, gradients and RNG are
    left unchanged.

    Raises
    ------
    DivergedError
        If the loss is not finite.
    """
    entered: list[Tensor] = []
    handles = []

    def listen(key: int, layer: nn.Module) -> None:
        def entering(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            entered.append(arguments[0].detach().clone())

        def leaving(_: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> None:
            # Keep the input of this call: on a batch other than the traced one, a layer may be called several
            # times.
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
        with untouched(model, loss_fn):
            loss = compute_loss(model, loss_fn, batch)
            if not torch.isfinite(loss):
                raise DivergedError(f"the loss on a probe batch is {loss.item()}: check it for NaN")
            loss.backward()  # type: ignore[no-untyped-call]
    finally:
        for handle in handles:
            handle.remove()
