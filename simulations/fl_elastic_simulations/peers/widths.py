"""Which axes of a model's tensors are the same channels: what must shrink together when a model gets narrower."""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from fl_elastic.errors import ModelError
from fl_elastic.groups.untouched import untouched
from fl_elastic.methods.windows.windows import kept_units
from fl_elastic_simulations.peers.operations import (
    CONVOLUTIONS,
    JOINS,
    NORMS,
    RESHAPES,
    keeps_channels,
)

__all__ = ["Channels", "LayerChannels", "Starts", "channels_of"]

Starts: TypeAlias = Mapping[int, int]
"""The first channel of each space's window, which goes on at channel 0 after the last; 0 for spaces left out."""


@dataclass(frozen=True)
class Channels:
    """What runs along one axis.

    Attributes
    ----------
    space : int
        Axes with the same number hold the same channels.
    size : int
        How many channels.
    repeat : int
        Entries of the axis per channel: more than one once images have been flattened.
    fixed : bool
        Whether they are the model's inputs or outputs, which no narrower model may lose.
    """

    space: int
    size: int
    repeat: int = 1
    fixed: bool = False

    def kept(self, rate: float) -> int:
        """Return how many entries of the axis a model of this rate keeps: those of the first channels.

        >>> Channels(space=0, size=10, repeat=4).kept(0.25)
        12
        """
        return self.repeat * (self.size if self.fixed else math.ceil(self.size * rate))

    def entries(self, rate: float, starts: Starts) -> NDArray[np.int64]:
        """Return the entries of the axis that a model of this rate keeps, of the window from the space's start.

        >>> Channels(space=0, size=4, repeat=2).entries(0.5, {0: 3}).tolist()
        [6, 7, 0, 1]
        """
        length = self.kept(rate) // self.repeat
        units = kept_units(self.size, length, 0 if self.fixed else starts.get(self.space, 0))
        return (units[:, None] * self.repeat + np.arange(self.repeat)).reshape(-1)


@dataclass(frozen=True)
class LayerChannels:
    """Channels that go into a layer and come out of it.

    Attributes
    ----------
    module : str
        A convolution, a linear layer or a norm.
    inputs : Channels or None
        None if every channel is worked on by itself, as by a norm or a depthwise convolution.
    outputs : Channels
        What comes out.
    is_output : bool
        Whether that is what the model returns.
    """

    module: str
    inputs: Channels | None
    outputs: Channels
    is_output: bool


def channels_of(model: nn.Module, inputs: torch.Tensor) -> tuple[LayerChannels, ...]:
    """Follow the channels through a model of convolutions, linear layers and norms.

    Parameters
    ----------
    model : nn.Module
        Left as it was.
    inputs : Tensor
        Some inputs, channels on axis 1.

    Raises
    ------
    ModelError
        If the model cannot be traced, or holds an operation whose channels are not known to be kept.

    Examples
    --------
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(32, 5))
    >>> first, last = channels_of(model, torch.zeros(1, 3, 4, 4))
    >>> first.outputs.size, last.inputs.size, last.inputs.repeat, last.outputs.fixed
    (8, 8, 4, True)
    """
    if len({id(p) for _, p in _parameters(model)}) < len(_parameters(model)):
        raise ModelError("a model with tied weights cannot be made narrower: untie them")
    copy = deepcopy(model).eval()
    try:
        traced = fx.symbolic_trace(copy)
        with untouched(copy), torch.no_grad():
            ShapeProp(traced).propagate(inputs)
    except (fx.proxy.TraceError, TypeError, RuntimeError, ValueError, AttributeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"the model cannot be traced, so not be made narrower: {reason}"
        ) from error
    walk = _Walk(copy)
    for node in traced.graph.nodes:
        walk.visit(node)
    return walk.layers()


def _parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters(remove_duplicate=False))


class _Walk:
    """Visits operations in order, and joins the spaces of channels that are added or multiplied."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._parent: list[int] = []
        self._fixed: set[int] = set()
        self._output: int | None = None
        self._at: dict[fx.Node, Channels] = {}
        self._layers: dict[str, tuple[Channels | None, Channels]] = {}

    def layers(self) -> tuple[LayerChannels, ...]:
        """Return every layer met, with the spaces as they ended up."""
        fixed = {self._root(space) for space in self._fixed}

        def final(channels: Channels) -> Channels:
            root = self._root(channels.space)
            return Channels(root, channels.size, channels.repeat, root in fixed)

        output = None if self._output is None else self._root(self._output)
        return tuple(
            LayerChannels(name, None if i is None else final(i), final(o),
                          i is not None and self._root(o.space) == output)
            for name, (i, o) in self._layers.items()
        )  # fmt: skip

    def visit(self, node: fx.Node) -> None:
        """Work out the channels of one operation's result."""
        given = [n for n in node.all_input_nodes if n in self._at]
        if node.op == "placeholder":
            self._at[node] = self._fix(self._new(self._shape(node)[1]))
        elif node.op == "output":
            if not given or node.args[0] is not given[0] or self._at[given[0]].repeat != 1:
                raise ModelError(
                    "only a model with one output of class scores can be made narrower"
                )
            self._output = self._fix(self._at[given[0]]).space
        elif node.op == "get_attr":
            raise self._refusal(node)
        elif not given or not self._shape(node):
            # Sizes, numbers: nothing with channels.
            return
        elif node.op == "call_module" and self._is_layer(node):
            self._at[node] = self._layer(node, self._at[given[0]])
        elif node.op != "call_module" and node.target in JOINS:
            self._at[node] = self._join(node, given)
        elif len(given) == 1 and self._is_flattening(node, given[0]):
            flat = self._at[given[0]]
            repeat = self._shape(node)[1] // flat.size
            self._at[node] = Channels(flat.space, flat.size, repeat)
        elif len(given) == 1 and keeps_channels(node, self._modules):
            self._at[node] = self._at[given[0]]
        else:
            raise self._refusal(node)

    def _is_layer(self, node: fx.Node) -> bool:
        return isinstance(self._modules[str(node.target)], (*CONVOLUTIONS, nn.Linear, *NORMS))

    def _layer(self, node: fx.Node, given: Channels) -> Channels:
        name = str(node.target)
        module: Any = self._modules[name]
        inputs: Channels | None = given
        known = self._layers.get(name)
        if isinstance(module, NORMS):
            inputs, outputs = None, given
            if isinstance(module, nn.GroupNorm) and given.repeat != 1:
                raise self._refusal(node)
        elif isinstance(module, nn.Linear):
            if len(self._shape(node)) != 2:
                raise self._refusal(node)
            outputs = known[1] if known else self._new(module.out_features)
        elif module.groups == 1:
            outputs = known[1] if known else self._new(module.out_channels)
        elif module.groups == module.in_channels == module.out_channels:
            inputs, outputs = None, given
        else:
            raise self._refusal(node)
        if known and known[0] is not None and inputs is not None:
            self._unite(known[0], inputs, node)
        if known:
            self._unite(known[1], outputs, node)
        self._layers[name] = inputs, outputs
        return outputs

    def _join(self, node: fx.Node, given: list[fx.Node]) -> Channels:
        first = self._at[given[0]]
        if any(self._shape(n)[:2] != self._shape(node)[:2] for n in given):
            raise self._refusal(node)
        for other in given[1:]:
            self._unite(first, self._at[other], node)
        return first

    def _is_flattening(self, node: fx.Node, given: fx.Node) -> bool:
        before, after = self._shape(given), self._shape(node)
        name = getattr(node.target, "__name__", node.target)
        if node.op == "call_module":
            name = "flatten" if isinstance(self._modules[str(node.target)], nn.Flatten) else ""
        return name in RESHAPES and after == (before[0], math.prod(before[1:]))

    def _new(self, size: int) -> Channels:
        self._parent.append(len(self._parent))
        return Channels(len(self._parent) - 1, size)

    def _fix(self, channels: Channels) -> Channels:
        self._fixed.add(channels.space)
        return channels

    def _root(self, space: int) -> int:
        while self._parent[space] != space:
            space = self._parent[space]
        return space

    def _unite(self, one: Channels, other: Channels, node: fx.Node) -> None:
        if (one.size, one.repeat) != (other.size, other.repeat):
            raise self._refusal(node)
        self._parent[self._root(one.space)] = self._root(other.space)

    def _shape(self, node: fx.Node) -> tuple[int, ...]:
        shape = getattr(node.meta.get("tensor_meta"), "shape", ())
        return tuple(int(length) for length in shape)

    def _refusal(self, node: fx.Node) -> ModelError:
        what = getattr(node.target, "__name__", node.target)
        if node.op == "call_module":
            what = f"{node.target} ({type(self._modules[str(node.target)]).__name__})"
        return ModelError(
            f"{what} cannot be made narrower: known are models of convolutions, linear layers, batch and "
            "group norms, residual sums and what keeps channels as they are"
        )
