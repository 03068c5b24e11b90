"""Where activations are tapped: at each layer's input, and at its output after norm and activation."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fl_elastic.groups import TensorGroup
from fl_elastic.groups.graph import BackwardGraph
from fl_elastic.ops.lean_forward import owns_weights

_NORMS = ("BatchNorm", "GroupNorm", "LayerNorm", "InstanceNorm")
_ACTIVATIONS = (
    "Relu", "Hardtanh", "Hardswish", "Silu", "Gelu", "LeakyRelu", "Elu", "Mish", "Sigmoid", "Hardsigmoid", "Tanh",
    "Softplus", "Prelu",
)  # fmt: skip
_LOOKUPS = ("Embedding", "Index", "Gather")
_VIEWS = ("View", "UnsafeView", "ReshapeAlias")

Key: TypeAlias = tuple[Any, int]


@dataclass(frozen=True)
class Layer:
    """A convolution or linear layer whose channels can be scored.

    Attributes
    ----------
    group : TensorGroup
        The layer's tensor group.
    module : nn.Conv2d or nn.Linear
        The module that owns the weight.
    users : tuple of nn.Module
        All modules that hold this weight.
    outputs : tuple of (str, int)
        Modules, with the index of their call, whose outputs are the layer's channels after norm and activation.
    """

    group: TensorGroup
    module: nn.Conv2d | nn.Linear
    users: tuple[nn.Module, ...]
    outputs: tuple[tuple[str, int], ...]

    @property
    def channel_dimension(self) -> int:
        """Dimension of the channels in the layer's activations, counted from the last."""
        return -1 if isinstance(self.module, nn.Linear) else -3


def scored_layers(
    model: nn.Module, groups: Sequence[TensorGroup], graph: BackwardGraph
) -> list[Layer]:
    """Return the ``Conv2d`` and ``Linear`` layers among ``groups`` whose weight is trained.

    A layer's output is followed through its norm and its first activation as long as each is used only by the next
    one (where TinyTrain and BlockSwap tap); an activation that is not a module is not followed.
    """
    holders = defaultdict(list)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in model.modules():
        # Computed weights, as with a weight norm, are not parameters, and reading a weight under a spectral norm
        # changes the norm's state.
        if isinstance(module, (nn.Conv2d, nn.Linear)) and owns_weights(module):
            holders[names.get(id(module.weight), "")].append(module)
    places = {
        group.name: nodes for group, nodes in zip(graph.groups, graph.group_nodes(), strict=True)
    }
    ends = _Ends(graph)
    layers = []
    for group in groups:
        users = next((tuple(holders[name]) for name in group.parameters if name in holders), ())
        # The output of an embedding that shares the weight has the weight's columns as channels, not its rows.
        outputs = [
            ends.of(node)
            for node in places.get(group.name, ())
            if not graph.nodes[node].name.startswith(_LOOKUPS)
        ]
        if users and outputs and None not in outputs:
            layers.append(Layer(group, users[0], users, tuple(end for end in outputs if end)))
    return layers


class _Ends:
    """Finds the module call that outputs a layer's channels after norm and activation."""

    def __init__(self, graph: BackwardGraph) -> None:
        self._nodes = graph.nodes
        self._users: dict[int, list[int]] = defaultdict(list)
        for index, node in enumerate(graph.nodes):
            for below in node.inputs:
                self._users[below].append(index)

    def of(self, node: int) -> tuple[str, int] | None:
        """Return the module and the index of its call; None if no module outputs the channels."""
        found = [place for place in self._chain(node) if self._nodes[place].module]
        if not found:
            return None
        module = self._nodes[found[-1]].module
        # Nodes are ordered from the loss to the input, calls in the other direction.
        later = [
            n for n in range(found[-1] + 1, len(self._nodes)) if self._nodes[n].module == module
        ]
        return module, len(later)

    def _chain(self, node: int) -> Iterator[int]:
        yield node
        # A linear layer of more than two dimensions is a matrix product and a view.
        is_product = not self._nodes[node].name.startswith(("Conv", "Mkldnn", "SlowConv"))
        expected = (_VIEWS if is_product else (), _NORMS, _ACTIVATIONS)
        for names in expected:
            users = self._users[node]
            if len(users) == 1 and any(name in self._nodes[users[0]].name for name in names):
                node = users[0]
                yield node


@dataclass(frozen=True)
class Tap:
    """One tensor of a forward pass: its value, and its place in the backward graph."""

    value: Tensor
    edge: GradientEdge


@dataclass
class Taps:
    """The tensors that one forward pass put into and out of the layers.

    Attributes
    ----------
    tensors : dict
        Each tapped tensor once, even if it leaves one layer and enters others.
    entering, leaving : dict of str to list
        Keys of the tensors that enter and leave each group's layer, one per use.
    """

    tensors: dict[Key, Tap] = field(default_factory=dict)
    entering: dict[str, list[Key]] = field(default_factory=lambda: defaultdict(list))
    leaving: dict[str, list[Key]] = field(default_factory=lambda: defaultdict(list))

    @contextmanager
    def listening(self, model: nn.Module, layers: Iterable[Layer]) -> Iterator[None]:
        """Tap every forward pass of ``model`` inside the block."""
        calls: Counter[str] = Counter()
        wanted: dict[str, dict[int, Layer]] = defaultdict(dict)
        handles = []

        def note(uses: dict[str, list[Key]], layer: Layer, tensor: Any) -> None:
            key = self.take(layer, tensor) if isinstance(tensor, Tensor) else None
            if key is not None:
                uses[layer.group.name].append(key)

        def enters(layer: Layer) -> Any:
            def hook(_: nn.Module, arguments: tuple[Any, ...]) -> None:
                note(self.entering, layer, arguments[0] if arguments else None)

            return hook

        def leaves(module: str) -> Any:
            def hook(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
                layer = wanted[module].get(calls[module])
                calls[module] += 1
                if layer is not None:
                    note(self.leaving, layer, output)

            return hook

        for layer in layers:
            for user in layer.users:
                handles.append(user.register_forward_pre_hook(enters(layer)))
            for module, call in layer.outputs:
                wanted[module][call] = layer
        for module in wanted:
            handles.append(model.get_submodule(module).register_forward_hook(leaves(module)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def gradients(self, loss: Tensor) -> dict[Key, Tensor]:
        """Return the gradient of every tapped tensor that the loss depends on."""
        if not self.tensors or not loss.requires_grad:
            return {}
        edges = [tap.edge for tap in self.tensors.values()]
        found = torch.autograd.grad(loss, edges, allow_unused=True)
        pairs = zip(self.tensors, found, strict=True)
        return {key: gradient for key, gradient in pairs if gradient is not None}

    def take(self, layer: Layer, tensor: Tensor) -> Key | None:
        """Keep the value and edge of a tensor at a layer; return its key, None if it needs no gradient."""
        if not tensor.requires_grad:
            return None
        # The edge identifies the tensor's present version, even if it is modified in place later.
        edge = get_gradient_edge(tensor)
        key = (edge.node, edge.output_nr)
        if key not in self.tensors:
            self.tensors[key] = Tap(tensor.detach().clone(), edge)
        return key
