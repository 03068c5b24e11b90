"""Cuts: places where the rest of the model depends only on one tensor, the input or output of a module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fl_elastic.groups.graph import BackwardNode, Block, Cut
from fl_elastic.groups.torch_private import refuse_nested


@dataclass
class Call:
    """One call of one module.

    Attributes
    ----------
    module : str
        Name of the module; empty for the model itself.
    parents : tuple of int
        Indices of the calls around this one, outermost first.
    input_node, output_node : node or None
        Autograd node of the only input tensor, and of the output tensor.
    output_shape : tuple of int or None
        Shape of the output tensor; None if the output is something else.
    is_random : bool
        Whether the module drops values at random in its present mode.
    """

    module: str
    parents: tuple[int, ...]
    input_node: Any = None
    output_node: Any = None
    output_shape: tuple[int, ...] | None = None
    is_random: bool = False


@contextmanager
def recorded_calls(model: nn.Module) -> Iterator[list[Call]]:
    """Record every module call of ``model`` inside the block, in the order in which the calls began."""
    calls: list[Call] = []
    stack: list[int] = []
    handles = []

    def entering(name: str) -> Any:
        def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            if not name:
                # The whole model is called again after a failed call, whose records belong to no graph.
                calls.clear()
                stack.clear()
            node = _only_node((*arguments, *keywords.values()))
            calls.append(Call(name, tuple(stack), node, is_random=_is_random(module)))
            stack.append(len(calls) - 1)

        return hook

    def leaving(_: nn.Module, __: Any, output: Any) -> None:
        call = calls[stack.pop()]
        if isinstance(output, Tensor):
            refuse_nested(output)
            call.output_node, call.output_shape = output.grad_fn, tuple(output.shape)

    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(entering(name), with_kwargs=True))
        handles.append(module.register_forward_hook(leaving))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _is_random(module: nn.Module) -> bool:
    """Return whether a module is an active dropout of any kind, which have no common base class."""
    name = type(module).__name__
    drops = "Dropout" in name or name in ("StochasticDepth", "DropPath")
    return drops and module.training and bool(getattr(module, "p", 1.0))


def _only_node(values: tuple[Any, ...]) -> Any:
    """Return the autograd node of a call's argument if that is a single tensor, else None."""
    if len(values) == 1 and isinstance(values[0], Tensor):
        return values[0].grad_fn
    return None


def find_cuts(
    nodes: Sequence[BackwardNode],
    position: Mapping[Any, int],
    starts: Set[int],
    calls: Sequence[Call],
) -> tuple[Cut, ...]:
    """Return the cuts of one forward pass, shallowest first, at most one between two tensor groups.

    Parameters
    ----------
    nodes : sequence of BackwardNode
        In backward order.
    position : mapping
        Index of each live autograd node.
    starts : set of int
        Indices of the nodes that read the model's input directly.
    calls : sequence of Call
        Every module call of the forward pass.

    Notes
    -----
    A node is a bottleneck if no edge of the graph leads from above it to below it. Of several
    bottlenecks between the same two groups, the one nearest to the loss is chosen, because pooling may have made
    the tensor smaller there. The output of a dropout is not a cut, because its randomness belongs to the trained
    part.
    """
    bottlenecks = _bottlenecks(nodes, starts)
    often = Counter(call.module for call in calls)
    users = Counter(below for node in nodes for below in node.inputs)
    random = {position.get(call.output_node) for call in calls if call.is_random}
    best: dict[int, Cut] = {}
    for index, call in enumerate(calls):
        if not call.module or often[call.module] > 1:
            continue
        for at_input, node in ((False, call.output_node), (True, call.input_node)):
            place = position.get(node) if node is not None else None
            if place is None or place not in bottlenecks or place in random:
                continue
            # If the tensor also bypasses the module, replacing only the module's input is not enough.
            skipped = None if at_input and users[place] > 1 else _skipped(calls, index)
            if skipped is None:
                continue
            cut = Cut(call.module, at_input, place, bottlenecks[place], skipped)
            known = best.get(cut.groups_above)
            if known is None or _rank(cut) < _rank(known):
                best[cut.groups_above] = cut
    return tuple(best[above] for above in sorted(best))


def find_blocks(
    nodes: Sequence[BackwardNode],
    position: Mapping[Any, int],
    starts: Set[int],
    calls: Sequence[Call],
) -> tuple[Block, ...]:
    """Return the modules whose input and output are both bottlenecks, with more than one node inside."""
    bottlenecks = _bottlenecks(nodes, starts)
    often = Counter(call.module for call in calls)
    blocks = []
    for call in calls:
        ends = [position.get(node) for node in (call.output_node, call.input_node)]
        if not call.module or often[call.module] > 1 or None in ends:
            continue
        output, given = (end for end in ends if end is not None)
        inner = given in bottlenecks and (output in bottlenecks or output < min(bottlenecks))
        if inner and given - output > 1:
            blocks.append(Block(call.module, output, given))
    return tuple(blocks)


def _bottlenecks(nodes: Sequence[BackwardNode], starts: Set[int]) -> dict[int, int]:
    """Return the bottleneck nodes, each with the number of groups above it, nearer to the loss.

    Groups are numbered in backward order by their deepest node. A bottleneck is left out if the groups above it are
    not exactly the first ones, for example if a tied tensor is used on both sides.
    """
    found: dict[int, int] = {}
    furthest = 0
    groups: set[int] = set()
    for index, node in enumerate(nodes):
        if furthest <= index and groups == set(range(len(groups))):
            below = {n.group for n in nodes[index:] if n.group is not None}
            if groups and below and not below & groups:
                found[index] = len(groups)
        # A node that reads the input directly creates a path to the input that bypasses all later nodes.
        furthest = len(nodes) if index in starts else max([furthest, *node.inputs])
        if node.group is not None:
            groups.add(node.group)
    return found


def _rank(cut: Cut) -> tuple[int, bool, int]:
    """Order cuts between the same groups: nearest to the loss, outputs before inputs, outermost module."""
    return cut.node, cut.at_input, cut.module.count(".")


def _skipped(calls: Sequence[Call], index: int) -> tuple[tuple[str, tuple[int, ...]], ...] | None:
    """Return the outermost modules that ran before the call at ``index`` and do not contain it.

    None if one of them outputs anything other than a tensor, which cannot be replaced, or has another call that
    contains the call at ``index``.
    """
    around = {*calls[index].parents}
    skipped: dict[str, tuple[int, ...]] = {}
    for position, call in enumerate(calls[:index]):
        if position not in around and set(call.parents) <= around:
            if call.output_shape is None or skipped.get(call.module) not in (
                None,
                call.output_shape,
            ):
                return None
            # The module is called both before and around the cut: replacing it would skip the cut.
            if any(calls[parent].module == call.module for parent in around):
                return None
            skipped[call.module] = call.output_shape
    return tuple(skipped.items())
