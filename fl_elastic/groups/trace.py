"""Walk the autograd graph of one step and find its tensor groups, without architecture-specific code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from fl_elastic.errors import ModelError
from fl_elastic.groups.cuts import Call, find_blocks, find_cuts, recorded_calls
from fl_elastic.groups.forward import Batch, LossFn
from fl_elastic.groups.from_inputs import loss_from_inputs
from fl_elastic.groups.graph import UNUSED, BackwardGraph, BackwardNode, GroupKind, TensorGroup
from fl_elastic.groups.model_state import ModelState
from fl_elastic.groups.torch_private import (
    NormWithStatistics,
    compiled_parts,
    number_of,
    output_shape,
    own_buffers,
    uncompiled,
    version_of,
)
from fl_elastic.groups.untouched import untouched
from fl_elastic.groups.widths import find_widths

_KINDS = (
    (GroupKind.CONV, ("Convolution", "Conv", "SlowConv", "MkldnnConv")),
    (GroupKind.LINEAR, ("Addmm", "Mm", "Linear", "Bmm", "Addbmm", "Baddbmm", "MvBackward", "Dot")),
    (GroupKind.NORM, ("NativeBatchNorm", "CudnnBatchNorm", "BatchNorm", "NativeLayerNorm",
                      "NativeGroupNorm", "FusedRmsNorm", "LayerNorm", "GroupNorm")),
    (GroupKind.EMBEDDING, ("Embedding",)),
)  # fmt: skip
# Nodes at which the activation path starts if the input consists of integers, which have no gradient.
_LOOKUPS = ("Embedding", "IndexBackward", "IndexSelect", "Gather")

_REENTRANT = "CheckpointFunctionBackward"
NO_GRADIENT = (
    "no trainable parameter takes part in the loss; check requires_grad and that the loss is computed from the "
    "model's outputs"
)
"""Error message for a loss without a gradient for any parameter."""


@dataclass(frozen=True)
class Trace:
    """A live backward graph: the plain graph and autograd's node objects.

    Attributes
    ----------
    graph : BackwardGraph
        Groups and nodes as plain values.
    loss : Tensor
        The loss at the root of the graph.
    nodes : tuple
        Autograd node of each ``graph.nodes`` entry; None for parameters that this batch does not use.
    weight_nodes : tuple of (node, int)
        Nodes between a group's parameters and its owner (transposes, parametrisations), with the group.
    """

    graph: BackwardGraph
    loss: Tensor
    nodes: tuple[Any, ...]
    weight_nodes: tuple[tuple[Any, int], ...]


def tensor_groups(model: nn.Module, loss_fn: LossFn, batch: Batch) -> list[TensorGroup]:
    """Return the tensor groups of ``model`` in backward order.

    Every parameter that requires a gradient belongs to a group. Parameters that this batch does not use (an expert
    that was not routed to, another head, a dropped layer) form one group per module, placed by the order of
    registration. The model, its buffers and the random state are left unchanged.

    Parameters
    ----------
    model : nn.Module
        Any module; residual connections, branches, tied and unused weights are found from the graph.
    loss_fn : callable
        ``loss_fn(outputs, targets)`` returning a scalar tensor.
    batch : tuple
        ``(inputs, targets)``; inputs may be a tensor, a tuple or a dict.

    Raises
    ------
    ModelError
        If no trainable parameter takes part in the loss.

    Examples
    --------
    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> batch = torch.randn(5, 4), torch.zeros(5, dtype=torch.long)
    >>> [group.name for group in tensor_groups(model, nn.functional.cross_entropy, batch)]
    ['2', '0']
    """
    model = uncompiled(model)
    with untouched(model, loss_fn):
        return list(trace_step(model, loss_fn, batch).graph.groups)


def trace_step(model: nn.Module, loss_fn: LossFn, batch: Batch) -> Trace:
    """Run one forward pass and return its live backward graph; buffers and the random state advance."""
    compiled = compiled_parts(model)
    if compiled:
        raise ModelError(
            f"{f'module {compiled[0]!r}' if compiled[0] else 'the model'} runs compiled code, which each new plan "
            "would compile anew: give it without compile(), or call torch.compile on the whole model"
        )
    before = {name for name, _ in model.named_parameters()}
    still = _movable(model)
    with recorded_calls(model) as calls:
        loss, sources = loss_from_inputs(model, loss_fn, batch)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    made = [name for name in names.values() if name not in before]
    if made:
        raise ModelError(
            f"the forward pass made the parameter {made[0]!r}, which no optimiser has: run the model on a batch "
            "before it is trained or sent"
        )
    order = _nodes_by_age(loss)
    if any(node.name() == _REENTRANT for node in order):
        raise ModelError(
            "the model uses reentrant activation checkpointing, under which layers above frozen ones get no "
            "gradient: checkpoint with use_reentrant=False, in transformers by gradient_checkpointing_enable("
            "gradient_checkpointing_kwargs={'use_reentrant': False})"
        )
    leaves = {node: name for node in order if (name := _leaf_parameter(node, names)) is not None}
    if not leaves:
        raise ModelError(NO_GRADIENT)
    on_path = _activation_path(order, sources, leaves)
    owned = {node: _owned(node, on_path, leaves) for node in on_path}
    live: list[Any] = [node for node in reversed(order) if node in on_path]
    owners = _without_penalties({node: owned[node][0] for node in live if owned[node][0]})
    unused = _unused_modules(model, owners.values())
    if unused:
        live = _with_unused(model, live, owners, unused)
        owners = {
            node: unused.get(node) or owners[node]
            for node in live
            if node in unused or node in owners
        }
    group_of, members = _group_owners(list(owners.items()))
    groups = _name_groups(model, members)
    position = {node: index for index, node in enumerate(live)}
    modules = _modules_of(calls)
    nodes = tuple(
        BackwardNode(UNUSED, group_of[node], ())
        if node in unused
        else BackwardNode(
            name=node.name(),
            group=group_of.get(node),
            inputs=tuple(position[n] for n, _ in node.next_functions if n in position),
            shape=output_shape(node),
            module=modules.get(node, ""),
        )
        for node in live
    )
    used = [node for node in live if node not in unused]
    weight_nodes = tuple(
        (inner, group_of[node]) for node in used for inner in owned[node][1] if node in group_of
    )
    starts = {
        position[node] for node in used if any(inner in sources for inner, _ in node.next_functions)
    }
    # If another batch may take another path through the model, one traced path proves no bottleneck.
    cuts = () if unused else find_cuts(nodes, position, starts, calls)
    blocks = () if unused else find_blocks(nodes, position, starts, calls)
    widths = () if unused else find_widths(model, nodes, groups)
    live = [None if node in unused else node for node in live]
    moved = [each for key, each in _movable(model).items() if key not in still]
    graph = _with_moved(BackwardGraph(groups, nodes, cuts, blocks, widths), model, moved)
    return Trace(graph, loss, tuple(live), weight_nodes)


def _modules_of(calls: list[Call]) -> dict[Any, str]:
    """Return for each node the innermost module that made it, not one that only returned its tensor unchanged."""
    makers: dict[Any, int] = {}
    for index, call in enumerate(calls):
        known = makers.get(call.output_node)
        if call.output_node is not None and (known is None or known in call.parents):
            makers[call.output_node] = index
    return {node: calls[index].module for node, index in makers.items()}


def _nodes_by_age(loss: Tensor) -> list[Any]:
    """Return all nodes below the loss, oldest first, so that inputs precede their users.

    The autograd engine runs ready nodes by descending sequence number, and a node is always younger than its
    inputs, so the reverse of this list is the order of execution.
    """
    if loss.grad_fn is None:
        return []
    seen = {loss.grad_fn}
    stack = [loss.grad_fn]
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                stack.append(node)
    # AccumulateGrad nodes carry the largest number although they are leaves.
    return sorted(seen, key=lambda node: -1 if _is_leaf(node) else number_of(node))


def _is_leaf(node: Any) -> bool:
    return hasattr(node, "variable")


def _leaf_parameter(node: Any, names: dict[int, str]) -> str | None:
    return names.get(id(node.variable)) if _is_leaf(node) else None


def _activation_path(order: list[Any], sources: set[Any], leaves: dict[Any, str]) -> set[Any]:
    """Return the nodes through which the error gradient passes from the loss towards the input.

    Everything else between a parameter and this path (transposes, parametrisations, learned tokens)
    belongs to the parameter's side.
    """
    reaches = set(sources)
    path: set[Any] = set()
    for node in order:
        if node in sources or _is_leaf(node):
            continue
        starts = node.name().startswith(_LOOKUPS) and any(
            n in leaves for n, _ in node.next_functions
        )
        if starts or any(n in reaches for n, _ in node.next_functions):
            reaches.add(node)
            path.add(node)
    if path:
        return path
    # There is no input to follow, as in a model of parameters only: use every node that joins tensors.
    joining = {n for n in order if not _is_leaf(n) and len(n.next_functions) > 1}
    return joining or {order[-1]}


def _owned(node: Any, on_path: set[Any], leaves: dict[Any, str]) -> tuple[list[str], list[Any]]:
    """Return the parameters that reach ``node`` without an activation node in between, and the nodes on the way."""
    parameters: list[str] = []
    passed: list[Any] = []
    stack = [n for n, _ in node.next_functions if n is not None and n not in on_path]
    seen = set(stack)
    while stack:
        inner = stack.pop()
        if inner in leaves:
            parameters.append(leaves[inner])
            continue
        if not _is_leaf(inner):
            passed.append(inner)
        for deeper, _ in inner.next_functions:
            if deeper is not None and deeper not in on_path and deeper not in seen:
                seen.add(deeper)
                stack.append(deeper)
    return parameters, passed


def _without_penalties(owners: dict[Any, list[str]]) -> dict[Any, list[str]]:
    """Return the owners, leaving out penalty terms of the loss that use the parameters of several layers.

    Such a penalty, for example that of FedProx, would join these layers into one group. Its gradient for a
    parameter does not depend on other layers, and is computed before that of the layer itself, so it is available
    whenever the layer is trained.
    """
    users = Counter(name for names in owners.values() for name in names)
    order, found = list(owners), dict[Any, list[str]]()
    for index, node in enumerate(order):
        own = owners[node]
        if sum(users[name] > 1 for name in own) > 1:
            # Another penalty, or another use of the same layer, has all of these parameters.
            layers = [each for each in order[index + 1 :] if not set(own) <= set(owners[each])]
            layer_of = {name: layer for layer in layers for name in owners[layer]}
            if len({layer_of[name] for name in own if name in layer_of}) > 1:
                own = [name for name in own if name not in layer_of]
        if own:
            found[node] = own
    return found


def _unused_modules(model: nn.Module, used: Iterable[list[str]]) -> dict[Any, list[str]]:
    """Return the trainable parameters that took no part in the loss, by the module that holds them."""
    taken = {name for names in used for name in names}
    found: dict[Any, list[str]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name not in taken:
            # A parametrisation holds its original parameters one level further down.
            module = name.split(".parametrizations.")[0] if ".parametrizations." in name else ""
            found.setdefault(module or name.rpartition(".")[0], []).append(name)
    return found


def _with_unused(
    model: nn.Module, live: list[Any], owners: dict[Any, list[str]], unused: dict[Any, list[str]]
) -> list[Any]:
    """Return the nodes, with each unused module placed just above the module that is registered before it."""
    rank = {name: index for index, (name, _) in enumerate(model.named_parameters())}
    group_of, _ = _group_owners([(node, owners[node]) for node in live if node in owners])
    deepest: dict[int, Any] = {}
    first: dict[int, int] = {}
    for node in live:
        if node in group_of:
            deepest[group_of[node]] = node
            lowest = min(rank[name] for name in owners[node])
            first[group_of[node]] = min(lowest, first.get(group_of[node], lowest))
    before: dict[Any, list[Any]] = {}
    last: list[Any] = []
    # Backward order: of several modules at one place, the one registered last comes first.
    for module in sorted(unused, key=lambda module: -rank[unused[module][0]]):
        own = rank[unused[module][0]]
        neighbours = [group for group, place in first.items() if place < own]
        if neighbours:
            place = deepest[max(neighbours, key=first.__getitem__)]
            before.setdefault(place, []).append(module)
        else:
            last.append(module)
    return [*(each for node in live for each in (*before.get(node, ()), node)), *last]


def _group_owners(
    owners: list[tuple[Any, list[str]]],
) -> tuple[dict[Any, int], list[tuple[list[str], GroupKind]]]:
    """Merge owners that share a parameter; place each merged group at its deepest owner."""
    cluster_of: dict[str, int] = {}
    clusters: dict[int, tuple[list[Any], list[str]]] = {}
    for index, (node, parameters) in enumerate(owners):
        shared = sorted({cluster_of[name] for name in parameters if name in cluster_of})
        nodes, names = [], []
        for old in shared:
            old_nodes, old_names = clusters.pop(old)
            nodes += old_nodes
            names += old_names
        names += [name for name in parameters if name not in names]
        clusters[index] = ([*nodes, node], names)
        cluster_of.update(dict.fromkeys(names, index))
    group_of: dict[Any, int] = {}
    members: list[tuple[list[str], GroupKind]] = []
    for group, (_, (nodes, names)) in enumerate(sorted(clusters.items())):
        group_of.update(dict.fromkeys(nodes, group))
        kind = GroupKind.OTHER if isinstance(nodes[-1], str) else _kind(nodes[-1].name())
        members.append((names, kind))
    return group_of, members


def _kind(node_name: str) -> GroupKind:
    return next((kind for kind, starts in _KINDS if node_name.startswith(starts)), GroupKind.OTHER)


def _name_groups(
    model: nn.Module, members: Iterable[tuple[list[str], GroupKind]]
) -> tuple[TensorGroup, ...]:
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    known = dict(model.named_parameters(remove_duplicate=False))
    times = Counter(map(id, known.values()))
    rank = {name: index for index, name in enumerate(shapes)}
    taken: dict[str, int] = {}
    groups = []
    for parameters, kind in members:
        ordered = tuple(sorted(parameters, key=rank.__getitem__))
        name = _common_module(ordered)
        taken[name] = taken.get(name, 0) + 1
        unique = name if taken[name] == 1 else f"{name}#{taken[name]}"
        copies = tuple(times[id(known[parameter])] for parameter in ordered)
        groups.append(
            TensorGroup(
                unique, ordered, tuple(shapes[p] for p in ordered), kind,
                copies if max(copies) > 1 else (), max(copies) * _statistics(model, ordered),
            )
        )  # fmt: skip
    return tuple(groups)


def _statistics(model: nn.Module, parameters: Iterable[str]) -> int:
    """Return the number of running statistics of the norms that own these parameters."""
    owners = {model.get_submodule(name.rpartition(".")[0]) for name in parameters}
    norms = [owner for owner in owners if isinstance(owner, NormWithStatistics)]
    found = [buffer for norm in norms for buffer in own_buffers(norm).values()]
    return sum(b.numel() for b in found if b is not None and b.is_floating_point())


def _movable(model: nn.Module) -> dict[tuple[int, int | None, str], Tensor]:
    """Return the tensors that a forward pass may change; keys are identity, count of writes, and sum for a buffer.

    These are all parameters and floating-point buffers, except the buffers of a norm with parameters.
    """
    found: dict[tuple[int, int | None, str], Tensor] = {
        (id(parameter), version_of(parameter), ""): parameter for parameter in model.parameters()
    }
    for module in model.modules():
        if isinstance(module, NormWithStatistics) and next(module.parameters(), None) is not None:
            continue
        for buffer in own_buffers(module).values():
            if buffer is not None and buffer.is_floating_point():
                # Torch does not count how often a norm writes its statistics.
                found[id(buffer), version_of(buffer), str(buffer.detach().sum().item())] = buffer
    return found


def _with_moved(graph: BackwardGraph, model: nn.Module, moved: Iterable[Tensor]) -> BackwardGraph:
    """Return the graph with all tensors that the forward pass changed counted for the head, which always trains."""
    names = ModelState.of(model).names
    sizes = {id(each): each.numel() * len(names.get(id(each), ())) for each in moved}
    if not sizes:
        return graph
    groups = list(graph.groups)
    for index, group in enumerate(groups):
        own = [id(model.get_parameter(name)) in sizes for name in group.parameters]
        if any(own):
            # Count it once, even if it is also trained, such as an embedding whose rows a call scales down.
            before = group.copies or (1,) * len(own)
            copies = tuple(0 if at else times for at, times in zip(own, before, strict=True))
            groups[index] = replace(group, copies=copies)
    head = groups[graph.head]
    groups[graph.head] = replace(head, statistics=head.statistics + sum(sizes.values()))
    return replace(graph, groups=tuple(groups))


def _common_module(parameters: tuple[str, ...]) -> str:
    """Return the module that holds all parameters, or the first parameter's own name."""
    if len(parameters) == 1 and parameters[0].rpartition(".")[2] not in ("weight", "bias"):
        return parameters[0]
    paths = [name.split(".")[:-1] for name in parameters]
    common: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common) or parameters[0]
