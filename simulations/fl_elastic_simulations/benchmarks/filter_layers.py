"""How long the backward pass of single convolutions takes with filtered gradients, against exact ones."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fl_elastic.groups import Mode
from fl_elastic.ops.lean_forward import lean_forward
from fl_elastic.profiling.clock import Clock

__all__ = [
    "FILTERED",
    "KINDS",
    "Layer",
    "backward_ratios",
    "kind_of",
    "layers_of",
    "median_by_kind",
]

FILTERED = tuple(Mode.parse(text) for text in ("w2", "w4", "wx2", "wx4"))
KINDS = ("dense 3x3", "pointwise", "depthwise", "stride 2")


@dataclass(frozen=True)
class Layer:
    """A convolution and the shape of what goes into it, batch first.

    Attributes
    ----------
    name : str
        Of the first module of this kind.
    module : nn.Conv2d
        That module.
    inputs : tuple of int
        Shape of its input.
    """

    name: str
    module: nn.Conv2d
    inputs: tuple[int, ...]

    @property
    def key(self) -> object:
        """What decides its time."""
        conv = self.module
        return (self.inputs, tuple(conv.weight.shape), conv.stride, conv.padding, conv.groups)

    @property
    def filters(self) -> bool:
        """Whether a filtered gradient can leave anything out: not on a map of one pixel."""
        return min(self.inputs[2:]) > 1


def kind_of(conv: nn.Conv2d) -> str:
    """Return one of `KINDS`, or "other"; a stride counts before everything else.

    Examples
    --------
    >>> [kind_of(nn.Conv2d(8, 8, 3, groups=8)), kind_of(nn.Conv2d(8, 8, 1, stride=2))]
    ['depthwise', 'stride 2']
    """
    if max(conv.stride) > 1:
        return "stride 2"
    if conv.groups == conv.in_channels > 1:
        return "depthwise"
    if conv.groups > 1:
        return "other"
    return {(1, 1): "pointwise", (3, 3): "dense 3x3"}.get(tuple(conv.kernel_size), "other")  # type: ignore[arg-type]


def layers_of(model: nn.Module, input_shape: Sequence[int]) -> list[Layer]:
    """Return every convolution in order of execution, with the shape of its input for such a batch."""
    found: list[Layer] = []
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):

            def note(conv: nn.Module, given: tuple[Tensor, ...], name: str = name) -> None:
                assert isinstance(conv, nn.Conv2d)
                found.append(Layer(name, conv, (input_shape[0], *given[0].shape[1:])))

            handles.append(module.register_forward_pre_hook(note))
    training = model.training
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, *input_shape[1:]))
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    return found


def backward_ratios(
    layers: Sequence[Layer], timer: Clock, *, repeats: int = 9
) -> dict[object, dict[str, tuple[float, float]]]:
    """Return backward time and whole time of each mode over the exact ones, by `Layer.key` and mode.

    Both gradients, of weight and input; the whole is forward and backward pass. Modes are taken in turn, and the
    fastest of each counts. Layers of one key are measured once, those that cannot be filtered not at all.
    """
    measured: dict[object, dict[str, tuple[float, float]]] = {}
    for layer in layers:
        if layer.filters and layer.key not in measured:
            measured[layer.key] = _ratios(layer, timer, repeats)
    return measured


def median_by_kind(
    layers: Sequence[Layer], ratios: Mapping[object, Mapping[str, tuple[float, float]]]
) -> dict[str, dict[str, float]]:
    """Return the medians over the layers of each kind, a layer counting as often as the model has it.

    Returns
    -------
    dict of str to dict
        By kind: ``layers``, ``shapes``, and per mode ``backward_w2`` and ``whole_w2`` and so on.
    """
    table: dict[str, dict[str, float]] = {}
    for kind in KINDS:
        keys = [lay.key for lay in layers if kind_of(lay.module) == kind and lay.key in ratios]
        if not keys:
            continue
        row: dict[str, float] = {"layers": len(keys), "shapes": len(Counter(keys))}
        for mode in ratios[keys[0]]:
            backward, whole = zip(*(ratios[key][mode] for key in keys), strict=True)
            row[f"backward_{mode}"] = statistics.median(backward)
            row[f"whole_{mode}"] = statistics.median(whole)
        table[kind] = row
    return table


def _ratios(layer: Layer, timer: Clock, repeats: int) -> dict[str, tuple[float, float]]:
    conv = layer.module
    x = torch.randn(layer.inputs).contiguous(memory_format=torch.channels_last)
    calls = {"exact": conv.forward}
    for mode in FILTERED:
        forward = lean_forward(conv, mode)
        if forward is not None:
            calls[str(mode)] = forward  # type: ignore[assignment]
    fastest = {name: (float("inf"), float("inf")) for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            leaf = x.detach().requires_grad_()
            started = timer()
            output = call(leaf)
            gradient = output.detach()
            middle = timer()
            torch.autograd.grad(output, [conv.weight, leaf], gradient)
            ended = timer()
            if repeat:
                backward, whole = fastest[name]
                fastest[name] = min(backward, ended - middle), min(whole, ended - started)
    exact = fastest.pop("exact")
    return {name: (b / exact[0], w / exact[1]) for name, (b, w) in fastest.items()}
