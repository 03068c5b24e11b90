"""Synthetic cost profiles: small enough to reason about, reproducible from a seed."""

from __future__ import annotations

import numpy as np

from fl_elastic.groups import TensorGroup
from fl_elastic.groups.graph import BackwardGraph, BackwardNode, GroupKind
from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.profile import ProfileKey

# Groups of one block of a branched graph: two on the long branch, one on the short.
_BLOCK_GROUPS = 3


def made_up_profile(groups: int = 8, *, branched: bool = False, seed: int = 0) -> CostProfile:
    """Return a profile with random costs, shaped like a measured one.

    Parameters
    ----------
    groups : int
        Number of tensor groups, at least 1.
    branched : bool
        Whether groups lie on parallel branches, as in a residual network, instead of on one chain.
    seed : int
        Seed of all costs and sizes.

    Examples
    --------
    >>> profile = made_up_profile(groups=3)
    >>> profile.group_names
    ('group0', 'group1', 'group2')
    >>> profile.full_step_seconds > profile.floor_step_seconds
    True
    """
    generator = np.random.default_rng(seed)
    graph = made_up_graph(groups, branched=branched, seed=seed)
    nodes = len(graph.nodes)
    owner = np.array([node.group is not None for node in graph.nodes])
    ends = np.array([not node.inputs for node in graph.nodes])
    return CostProfile(
        key=ProfileKey("made up", (4, 8), 1, "none", "none"),
        graph=graph,
        node_update_seconds=np.where(owner, generator.lognormal(-6.0, 0.7, nodes), 0.0),
        node_path_seconds=np.where(ends, 0.0, generator.lognormal(-6.0, 0.7, nodes)),
        optimizer_seconds=generator.uniform(1e-5, 1e-4, groups),
        forward_seconds=0.01 + np.cumsum(generator.uniform(0.0, 1e-3, groups)),
        fixed_seconds=1e-4,
        node_saved_bytes=generator.integers(0, 10_000, nodes).astype(np.float64),
        optimizer_bytes_per_weight=4.0,
    )


def made_up_graph(groups: int, *, branched: bool = False, seed: int = 0) -> BackwardGraph:
    """Return a backward graph: a chain of linear layers, or residual blocks."""
    sizes = np.random.default_rng(seed).integers(1, 40, groups)
    tensor_groups = tuple(
        TensorGroup(
            name=f"group{index}",
            parameters=(f"group{index}.weight", f"group{index}.bias"),
            shapes=((int(size), 3), (int(size),)),
            kind=GroupKind.LINEAR,
        )
        for index, size in enumerate(sizes)
    )
    blocks = (groups - 1) // _BLOCK_GROUPS if branched else 0
    nodes = [BackwardNode("Loss", None, (1,))]
    group = 0
    for _ in range(groups - blocks * _BLOCK_GROUPS):
        nodes += _layer(len(nodes), group)
        group += 1
    for _ in range(blocks):
        nodes += _block(len(nodes), group)
        group += _BLOCK_GROUPS
    # Nothing follows the last group's layer: the input of a model needs no gradient.
    last = max(index for index, node in enumerate(nodes) if node.group is not None)
    del nodes[last + 1 :]
    inputs_left = [tuple(i for i in node.inputs if i <= last) for node in nodes]
    return BackwardGraph(
        tensor_groups,
        tuple(BackwardNode(n.name, n.group, i) for n, i in zip(nodes, inputs_left, strict=True)),
    )


def _layer(start: int, group: int) -> list[BackwardNode]:
    return [BackwardNode("Addmm", group, (start + 1,)), BackwardNode("Relu", None, (start + 2,))]


def _block(start: int, group: int) -> list[BackwardNode]:
    join, first, second, short, fork = range(start, start + 5)
    return [
        BackwardNode("Add", None, (first, short)),
        BackwardNode("Addmm", group, (second,)),
        BackwardNode("Addmm", group + 1, (fork,)),
        BackwardNode("Addmm", group + 2, (fork,)),
        BackwardNode("Relu", None, (join + 5,)),
    ]
