"""Time every node of a backward pass, by hooks on autograd's nodes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from fl_elastic.groups.graph import BackwardGraph
from fl_elastic.groups.trace import Trace
from fl_elastic.profiling.clock import Clock
from fl_elastic.profiling.profile import Seconds

_FEW = 64


@dataclass(frozen=True)
class TracedEdges:
    """The edges of a traced step's graph, without autograd's nodes, which take a kilobyte each.

    Attributes
    ----------
    graph : BackwardGraph
        The graph of the step.
    names : list of str
        Name of each node of torch's graph, the loss first.
    places : list of int
        Index of each of these nodes in ``graph``, or -1; nodes between a group's parameters and its owner have the
        owner's index.
    edges : list of tuple of int
        Nodes below each node; -1 for none.
    """

    graph: BackwardGraph
    names: list[str]
    places: list[int]
    edges: list[tuple[int, ...]]

    @classmethod
    def of(cls, trace: Trace) -> TracedEdges:
        """Record the edges of a traced step's graph, so that the trace itself can be freed."""
        place_of = {node: index for index, node in enumerate(trace.nodes) if node is not None}
        owners = trace.graph.group_nodes()
        place_of |= {node: owners[group][-1] for node, group in trace.weight_nodes}
        number_in = {trace.loss.grad_fn: 0}
        names, places, edges = list[str](), list[int](), list[tuple[int, ...]]()
        # The list grows during the loop.
        found = [trace.loss.grad_fn]
        for node in found:
            assert node is not None
            names.append(sys.intern(node.name()))
            places.append(place_of.get(node, -1))
            below = [each for each, _ in node.next_functions]
            for each in below:
                if each is not None and each not in number_in:
                    number_in[each] = len(found)
                    found.append(each)
            edges.append(tuple(-1 if each is None else number_in[each] for each in below))
        return cls(trace.graph, names, places, edges)

    def along(self, root: Any) -> Iterator[tuple[int, str, Any]]:
        """Yield the place and name of each node, and the corresponding node below ``root``."""
        seen, stack = {-1}, [(0, root)]
        while stack:
            number, node = stack.pop()
            if node is None or number in seen or node.name() != self.names[number]:
                continue
            seen.add(number)
            stack += zip(
                self.edges[number], (each for each, _ in node.next_functions), strict=False
            )
            if self.places[number] >= 0:
                yield self.places[number], self.names[number], node


def time_nodes(edges: TracedEdges, loss: Tensor, clock: Clock) -> Seconds:
    """Run ``loss.backward()`` and return the seconds spent in each node of a traced graph, shape (M,).

    ``loss`` may belong to another graph of the same step, with other ``requires_grad`` flags. Both graphs are
    walked together from the loss, and nodes that the graph of ``loss`` does not have get NaN. The time of nodes
    between a group's parameters and its owner is added to the owner.

    On an accelerator each reading of the clock waits for the device, which a training step does not do. The time of
    the fastest node is assumed to be this wait, and is subtracted from every node.

    If many nodes are equal, such as the same operation at each time of a long sequence, only a few evenly spaced
    ones are timed, and all get their mean: hooks on all of them would take more memory and time than the step.
    """
    kinds: dict[object, list[tuple[int, Any]]] = {}
    for place, name, node in edges.along(loss.grad_fn):
        known = edges.graph.nodes[place]
        kind = name, known.group, known.shape, known.module
        kinds.setdefault(kind, []).append((place, node))
    timed = []
    for members in kinds.values():
        seconds: list[tuple[int, float]] = []
        handles = [_attach(node, index, seconds, clock) for index, node in _few_of(members)]
        timed.append((seconds, [index for index, _ in members], handles))
    kinds.clear()
    loss.backward()  # type: ignore[no-untyped-call]
    spent: list[tuple[int, float]] = []
    for seconds, indices, handles in timed:
        for handle in (each for pair in handles for each in pair):
            handle.remove()
        if len(indices) > _FEW and seconds:
            mean = sum(each for _, each in seconds) / len(seconds)
            spent += [(index, mean) for index in indices]
        else:
            spent += seconds
    return sums_by_node(spent, len(edges.graph.nodes), less_least=loss.device.type != "cpu")


def _few_of(members: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
    """Return a few evenly spaced members of a list of equal nodes."""
    count = min(len(members), _FEW)
    return [members[place * len(members) // count] for place in range(count)]


def sums_by_node(spent: list[tuple[int, float]], count: int, *, less_least: bool) -> Seconds:
    """Return the seconds of each of ``count`` nodes, NaN if it never ran; optionally minus the least of all."""
    least = min((each for _, each in spent), default=0.0) if less_least else 0.0
    totals: dict[int, float] = {}
    for index, each in spent:
        totals[index] = totals.get(index, 0.0) + each - least
    return np.array([totals.get(index, np.nan) for index in range(count)])


def _attach(node: Any, index: int, spent: list[tuple[int, float]], clock: Clock) -> list[Any]:
    started = [0.0]

    def before(_: Any) -> None:
        started[0] = clock()

    def after(_: Any, __: Any) -> None:
        spent.append((index, clock() - started[0]))

    return [node.register_prehook(before), node.register_hook(after)]
