"""FedEL's windows of blocks: how they move from round to round, and the costs of training inside one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from fl_elastic.errors import ProfileError
from fl_elastic.groups.graph import Cut
from fl_elastic.planning.knapsack import prefix_knapsack
from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.profile import Mask, Seconds


@dataclass(frozen=True)
class Window:
    """Neighbouring blocks, counted from the input.

    Attributes
    ----------
    end, front : int
        Blocks at its edges towards the input and towards the output; both belong to it.
    """

    end: int
    front: int


def first_window(seconds: Sequence[float], limit: float) -> Window:
    """Return the first blocks, just enough to reach the limit.

    Parameters
    ----------
    seconds : sequence of float
        Time of each block, from the input on.
    limit : float
        Seconds per step.

    Examples
    --------
    >>> first_window([2.0, 2.0, 2.0, 2.0], limit=3.0)
    Window(end=0, front=1)
    """
    return Window(0, _front(seconds, -1, limit))


def next_window(
    seconds: Sequence[float], limit: float, window: Window, selected: Collection[int]
) -> Window:
    """Return the window of the next round.

    The front moves over just enough new blocks to reach the limit; blocks at the end in which nothing was selected
    are dropped. After the front has reached the last block, it starts again.

    Parameters
    ----------
    seconds, limit : sequence of float, float
        As in `first_window`.
    window : Window
        Window of the last round.
    selected : collection of int
        Blocks in which something was trained.

    Examples
    --------
    >>> next_window([2.0, 2.0, 2.0, 2.0, 2.0], 3.0, Window(0, 1), selected=[1])
    Window(end=1, front=3)
    """
    if window.front >= len(seconds) - 1:
        return first_window(seconds, limit)
    front = _front(seconds, window.front, limit)
    kept = [block for block in range(window.end, window.front + 1) if block in selected]
    return Window(kept[0] if kept else window.front + 1, front)


def _front(seconds: Sequence[float], before: int, limit: float) -> int:
    """Return the first block after ``before`` at which the blocks from there on take the limit's time together."""
    front, spent = before + 1, seconds[before + 1]
    while front < len(seconds) - 1 and spent < limit:
        front += 1
        spent += seconds[front]
    return front


def _blocks_between(ends: Sequence[Cut], groups: int) -> tuple[range, ...]:
    """Return the groups of each block, from the input on, as indices in backward order.

    Parameters
    ----------
    ends : sequence of Cut
        Ends of all blocks but the last, from the input on.
    groups : int
        Number of groups of the model.
    """
    above = [*(end.groups_above for end in ends), 0]
    return tuple(range(low, high) for low, high in zip(above, [groups, *above[:-1]], strict=True))


class WindowCosts:
    """Costs of a model's blocks and windows.

    The forward pass runs up to the window's front, the backward pass from there. The exit is charged like the part
    of the model after its own last cut: its head and the loss.

    Parameters
    ----------
    profile : CostProfile
        Cost profile of the whole model.
    ends : sequence of Cut
        Ends of all blocks but the last, from the input on.

    Raises
    ------
    ProfileError
        If the profile is of a model without these ends, or its cuts were not measured.
    """

    def __init__(self, profile: CostProfile, ends: Sequence[Cut]) -> None:
        self.profile = profile
        known = {cut.groups_above: place for place, cut in enumerate(profile.graph.cuts)}
        if any(end.groups_above not in known for end in ends) or not len(profile.cut_plain_seconds):
            raise ProfileError(
                "the cost profile does not know the ends of the model's blocks: measure it for this model"
            )
        self._places = [known[end.groups_above] for end in ends]
        self.blocks = _blocks_between(ends, len(profile))

    @property
    def block_seconds(self) -> list[float]:
        """Seconds of each block's gradients and updates, from the input on: FedEL's T_b, without the forward."""
        each = self.profile.update_seconds + self.profile.path_seconds
        return [float(each[block.start : block.stop].sum()) for block in self.blocks]

    def groups(self, window: Window) -> range:
        """Return the groups of a window, in backward order."""
        return range(self.blocks[window.front].start, self.blocks[window.end].stop)

    def mask(self, window: Window) -> Mask:
        """Return the mask of all groups of a window."""
        mask = np.zeros(len(self.profile), dtype=bool)
        mask[list(self.groups(window))] = True
        return mask

    def nearest(self, window: Window) -> Mask:
        """Return the mask of the group nearest to the window's front."""
        mask = np.zeros(len(self.profile), dtype=bool)
        mask[self.groups(window).start] = True
        return mask

    def blocks_of(self, mask: Mask) -> list[int]:
        """Return the blocks in which a group of ``mask`` lies."""
        return [place for place, block in enumerate(self.blocks) if mask[list(block)].any()]

    def step_seconds(self, window: Window, mask: Mask) -> float:
        """Return the seconds of a step that trains the window's groups in ``mask`` and its exit."""
        profile = self.profile
        if window.front == len(self.blocks) - 1:
            return profile.step_seconds(mask)
        first, start = self.groups(window).start, self._front_node(window)
        running, passing = profile.running_nodes(mask)
        trained = np.array(
            [n.group is not None and bool(mask[n.group]) for n in profile.graph.nodes]
        )
        depth = int(np.flatnonzero(mask)[-1])
        deeper = float(profile.forward_seconds[depth] - profile.forward_seconds[first - 1])
        return (
            self._waiting(window)
            + max(deeper, 0.0)
            + float(profile.node_path_seconds[start:][passing[start:]].sum())
            + float(profile.node_update_seconds[start:][(running & trained)[start:]].sum())
            + float(profile.optimizer_seconds[mask].sum())
        )

    def select(self, window: Window, importance: Seconds, limit: float) -> Mask:
        """Return the most important groups in the window whose step fits ``limit`` seconds.

        Parameters
        ----------
        window : Window
            Window in which to select; if nothing fits, the group nearest to its front is selected.
        importance : array
            One number per group of the window, in backward order.
        limit : float
            Seconds per step.
        """
        groups, profile = self.groups(window), self.profile
        paths = profile.path_seconds[groups.start : groups.stop].copy()
        first = profile.graph.group_nodes()[groups.start][-1]
        paths[0] = profile.node_path_seconds[self._front_node(window) : first].sum()
        found = prefix_knapsack(
            profile.update_seconds[groups.start : groups.stop],
            paths,
            importance,
            max(limit - self._waiting(window), 0.0),
        )
        mask = np.zeros(len(profile), dtype=bool)
        mask[groups.start : groups.stop] = found.mask
        return mask if mask.any() else self.nearest(window)

    def _waiting(self, window: Window) -> float:
        """Return the seconds of a step apart from training in the window: its forward pass and exit."""
        profile = self.profile
        fixed = profile.fixed_seconds
        if window.front == len(self.blocks) - 1:
            return float(profile.forward_seconds[0]) + fixed
        last = profile.graph.cuts[0]
        exit_forward = max(float(profile.forward_seconds[0] - profile.cut_plain_seconds[0]), 0.0)
        exit_backward = float(
            profile.node_path_seconds[: last.node].sum()
            + profile.node_update_seconds[: last.node].sum()
            + profile.optimizer_seconds[: last.groups_above].sum()
        )
        forward = float(profile.cut_plain_seconds[self._places[window.front]])
        return forward + exit_forward + exit_backward + fixed

    def _front_node(self, window: Window) -> int:
        """Return the node of the tensor at the window's front; the first node if that is the loss."""
        if window.front == len(self.blocks) - 1:
            return 0
        return self.profile.graph.cuts[self._places[window.front]].node
