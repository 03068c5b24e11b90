"""Costs of steps that never train a part of the model: what lies below the fleet's cut, or a solved head."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fl_elastic.profiling.profile import CostProfile, ModeCosts

__all__ = ["trainable_part"]


def trainable_part(
    profile: CostProfile, groups_above: int | None = None, kept_head: str = ""
) -> CostProfile:
    """Return the profile as if the model had only the groups that may be trained.

    The forward pass keeps its costs at each depth, including the frozen prefix, and the error gradient still passes
    through a head that is not trained. A policy that plans with this profile cannot choose the rest of the model.

    Parameters
    ----------
    profile : CostProfile
        Costs of the whole model.
    groups_above : int, optional
        Number of groups above the fleet's cut, see `BackwardGraph.groups_above`; all by default.
    kept_head : str
        The head's group if it is not trained, else empty. It is trained nevertheless if there is no other group.
    """
    graph = profile.graph
    above = len(graph.groups) if groups_above is None else min(groups_above, len(graph.groups))
    kept = [g for g in range(above) if not kept_head or graph.groups[g].name != kept_head]
    if not kept or len(kept) == len(graph.groups):
        return profile
    number = {group: place for place, group in enumerate(kept)}
    part = replace(
        graph,
        groups=tuple(graph.groups[group] for group in kept),
        # Nodes of untrained groups still run, and take memory as in inference.
        nodes=tuple(
            replace(node, group=None if node.group is None else number.get(node.group))
            for node in graph.nodes
        ),
        # Cuts are kept because they locate blocks; their costs are part of the forward pass.
        cuts=tuple(
            replace(cut, groups_above=sum(group < cut.groups_above for group in kept))
            for cut in graph.cuts
        ),
    )
    modes = profile.modes
    if modes is not None:
        modes = ModeCosts(modes.modes, modes.update_ratio[kept], modes.path_ratio[kept])
    return replace(
        profile,
        graph=part,
        optimizer_seconds=profile.optimizer_seconds[kept],
        forward_seconds=profile.forward_seconds[kept],
        cut_plain_seconds=np.zeros(0),
        cut_inference_seconds=np.zeros(0),
        modes=modes,
    )
