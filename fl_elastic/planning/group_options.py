"""The modes in which each group of a profile may be trained, with their worth and costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fl_elastic.groups import Mode
from fl_elastic.groups.graph import Block
from fl_elastic.groups.mode import sent_bytes
from fl_elastic.planning.channel_modes import has_operations
from fl_elastic.planning.multiple_choice.choices import Choices
from fl_elastic.planning.request import PlanRequest
from fl_elastic.profiling.memory import (
    group_activation_bytes,
    path_activation_bytes,
    recompute_seconds,
    step_memory,
)


@dataclass(frozen=True, eq=False)
class GroupOptions:
    """Choices for the multiple-choice solver, and the mode of each of their columns.

    Attributes
    ----------
    modes : tuple of Mode
        Column 0 is frozen, column 1 is full.
    choices : Choices
        Worth and costs.
    """

    modes: tuple[Mode, ...]
    choices: Choices

    def modes_of(self, options: Sequence[int] | NDArray[np.intp]) -> list[Mode]:
        """Return the mode of each group for the chosen columns."""
        return [self.modes[int(option)] for option in options]


def group_options(
    request: PlanRequest, modes: Sequence[Mode], recomputed: Sequence[Block] = ()
) -> GroupOptions:
    """Return the choices of the multiple-choice solver.

    A mode is offered if its cost and fidelity are known and an operation can run it. Its worth is the group's
    importance times the squared cosine between the mode's gradient and the exact one: the share of the gradient
    that the mode keeps.

    Parameters
    ----------
    request : PlanRequest
        Profile, importance, fidelity and budget.
    modes : sequence of Mode
        Modes besides frozen and full.
    recomputed : sequence of Block
        Blocks whose activations are not stored.
    """
    profile, fidelity = request.profile, request.fidelity
    columns = (Mode.FROZEN, Mode.FULL, *modes)
    shape = (len(profile), len(columns))
    share, update = np.zeros(shape), np.zeros(shape)
    available = np.zeros(shape, dtype=bool)
    own_seconds = profile.update_seconds - profile.optimizer_seconds
    kinds_known = len(profile.node_lean) > 0
    runs = np.array(
        [not kinds_known or has_operations(profile, group) for group in range(len(profile))]
    )
    share[:, 1], available[:, :2] = 1.0, True
    update[:, 1] = profile.update_seconds
    for column, mode in enumerate(modes, start=2):
        costs = None if profile.modes is None else profile.modes.column(mode)
        kept = (
            None if fidelity is None or mode not in fidelity.modes else fidelity.modes.index(mode)
        )
        if costs is None or kept is None or profile.modes is None or fidelity is None:
            continue
        ratio, cosine = profile.modes.update_ratio[:, costs], fidelity.weights[:, kept]
        known = np.isfinite(ratio) & np.isfinite(cosine)
        if mode.kind == "channels":
            known &= runs
        available[:, column] = known
        share[known, column] = cosine[known].clip(0, 1) ** 2
        update[known, column] = own_seconds[known] * ratio[known] + profile.optimizer_seconds[known]
    if request.reachable is not None:
        available[request.reachable :, 1:] = False
    inside = {index for block in recomputed for index in block.nodes}
    memory = np.zeros(shape)
    uplink = np.zeros(shape)
    for index, group in enumerate(profile.graph.groups):
        for column in np.flatnonzero(available[index]).tolist():
            if column:
                uplink[index, column] = sent_bytes(group, columns[column])
                memory[index, column] = _option_bytes(request, index, columns[column], inside)
    path = profile.path_seconds.copy()
    for block in recomputed:
        first = min((g for i in block.nodes if (g := profile.graph.nodes[i].group) is not None),
                    default=len(path) - 1)  # fmt: skip
        path[first] += recompute_seconds(profile, block)
    return GroupOptions(
        columns,
        Choices(
            value=request.importance[:, None] * share,
            seconds=update,
            memory=memory,
            uplink=uplink,
            available=available,
            path_seconds=path,
            path_memory=path_activation_bytes(profile, inside, lean=request.lean),
            forced=(profile.graph.head,),
        ),
    )


def _option_bytes(request: PlanRequest, group: int, mode: Mode, inside: set[int]) -> float:
    profile = request.profile
    alone = [Mode.FROZEN] * len(profile)
    alone[group] = mode
    memory = step_memory(profile, alone)
    weights = memory.copies + memory.optimizer
    return weights + group_activation_bytes(profile, group, mode, inside, lean=request.lean)
