"""Run a model only for inference: norms folded into convolutions, images laid out channels last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fl_elastic.errors import ElasticError
from fl_elastic.groups.batch import map_tensors
from fl_elastic.groups.forward import Batch, channels_last
from fl_elastic.groups.graph import BackwardGraph
from fl_elastic.groups.torch_private import BatchNorm
from fl_elastic.groups.trace import trace_step
from fl_elastic.groups.untouched import untouched
from fl_elastic.losses import squared_outputs


def traced(model: nn.Module, batch: Batch) -> BackwardGraph:
    """Return the graph of a step in eval mode with everything trainable; the model is left unchanged.

    Raises
    ------
    ModelError
        If no step can be traced.
    """
    with untouched(model), torch.enable_grad():
        model.eval()
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        return trace_step(model, squared_outputs, batch).graph


@contextmanager
def as_inference(
    model: nn.Module,
    batch: Batch,
    read: Collection[str] = (),
    graph: BackwardGraph | None = None,
) -> Iterator[Callable[[Any], Any]]:
    """Fold norms into the convolutions before them inside the block; yield a function that prepares inputs.

    This function converts inputs to the memory format in which the folded model is fastest, channels last. In eval
    mode without gradients the model's outputs are the same up to rounding, in about half the time. A model that
    cannot be traced runs unchanged.

    Parameters
    ----------
    model : nn.Module
        In eval mode; its weights must not change inside the block.
    batch : batch
        A small batch.
    read : collection of str
        Modules whose outputs the caller reads: a convolution among them is not folded.
    graph : BackwardGraph, optional
        Result of `traced`, if it is known.
    """
    kinds = {type(module) for module in model.modules()}
    shadowed: list[nn.Module] = []
    if not any(issubclass(kind, BatchNorm) for kind in kinds):
        yield lambda inputs: inputs
        return
    try:
        graph = traced(model, batch) if graph is None else graph
        # If this batch does not use some parameters, another batch may take another path through the model.
        pairs = [] if graph.unused else foldable_pairs(graph, model)
    except (ElasticError, RuntimeError, ValueError, TypeError, IndexError):
        pairs = []
    try:
        for convolution, norm in pairs:
            layer, after = model.get_submodule(convolution), model.get_submodule(norm)
            own = {"forward"} & {*layer.__dict__, *after.__dict__}
            folded = fold(layer, after) if isinstance(layer, nn.Conv2d) else None
            if convolution not in read and not own and folded is not None:
                layer.__dict__["forward"], after.__dict__["forward"] = folded, _as_it_is
                shadowed += [layer, after]
        yield lambda inputs: map_tensors(channels_last, inputs)
    finally:
        for module in shadowed:
            del module.__dict__["forward"]


def _as_it_is(inputs: Tensor) -> Tensor:
    return inputs


def foldable_pairs(graph: BackwardGraph, model: nn.Module, below: int = 0) -> list[tuple[str, str]]:
    """Return pairs of names ``(convolution, norm)`` in which only the norm uses the convolution's output.

    Parameters
    ----------
    graph : BackwardGraph
        Shows which node uses which output.
    model : nn.Module
        Holds the modules.
    below : int
        Only nodes from this index on, that is, at least this deep, are considered.
    """
    modules = dict(model.named_modules())
    users = Counter(inner for node in graph.nodes for inner in node.inputs)
    met = Counter(node.module for node in graph.nodes)
    pairs = []
    for node in graph.nodes[below:]:
        if len(node.inputs) != 1 or not isinstance(modules.get(node.module), BatchNorm):
            continue
        source = graph.nodes[node.inputs[0]]
        alone = users[node.inputs[0]] == met[node.module] == met[source.module] == 1
        if alone and isinstance(modules.get(source.module), nn.Conv2d):
            pairs.append((source.module, node.module))
    return pairs


def fold(convolution: nn.Conv2d, norm: nn.Module) -> Callable[[Tensor], Tensor] | None:
    r"""Return one forward function for a convolution and its norm in eval mode.

    :math:`W' = W\gamma/\sigma` and :math:`b' = (b-\mu)\gamma/\sigma+\beta`.

    None if the norm has no running statistics, so that it cannot run as inference. The weights are copied, so fold
    again after they have changed.
    """
    mean, variance = getattr(norm, "running_mean", None), getattr(norm, "running_var", None)
    if not isinstance(mean, Tensor) or not isinstance(variance, Tensor):
        return None
    with torch.no_grad():
        scale = torch.rsqrt(variance + float(getattr(norm, "eps", 1e-5)))
        if isinstance(gamma := getattr(norm, "weight", None), Tensor):
            scale = scale * gamma
        bias = -mean if convolution.bias is None else convolution.bias - mean
        bias = bias * scale
        if isinstance(beta := getattr(norm, "bias", None), Tensor):
            bias = bias + beta
        weight = convolution.weight * scale.reshape(-1, 1, 1, 1)
        weight = weight.contiguous(memory_format=torch.channels_last)

    def forward(inputs: Tensor) -> Tensor:
        # torch has no public function that also applies the module's padding mode.
        folded: Tensor = convolution._conv_forward(inputs, weight, bias)
        return folded

    return forward
