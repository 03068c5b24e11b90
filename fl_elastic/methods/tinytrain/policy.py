"""Layers by Fisher potential over size and multiply-adds, then their best channels: TinyTrain-style."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np

from fl_elastic.budget import Budget
from fl_elastic.errors import BudgetError, PlanError
from fl_elastic.groups import Mode
from fl_elastic.groups.mode import Axis
from fl_elastic.planning.channel_modes import (
    RATIOS,
    channel_modes,
    known_layers,
    refuse_without_layers,
)
from fl_elastic.planning.group_options import group_options
from fl_elastic.planning.importance.base import Scores
from fl_elastic.planning.joint.choices import Choices, Limits
from fl_elastic.planning.joint.knapsack import joint_knapsack
from fl_elastic.planning.plan import Plan
from fl_elastic.planning.policy import POLICIES, Needs, Policy
from fl_elastic.planning.request import PlanRequest
from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.macs import backward_macs, group_macs
from fl_elastic.profiling.memory import step_memory

__all__ = [
    "TinyTrainInputPolicy",
    "TinyTrainKnapsackPolicy",
    "TinyTrainLearnedPolicy",
    "TinyTrainNoDepthwisePolicy",
    "TinyTrainPolicy",
    "TinyTrainRandomPolicy",
    "layer_worth",
]

_DEFAULT_MACS_SHARE = 0.15
_RECOSTINGS = 4


def layer_worth(profile: CostProfile, potential: Scores) -> Scores:
    r"""Return TinyTrain's score of every group, shape (N,).

    :math:`s_i = P_i / (\frac{|W_i|}{\max |W|} \frac{M_i}{\max M})` with Fisher potential P, number of parameters
    \|W\| and multiply-adds M; the maxima are over all layers (Kwon et al., ICML 2024). If multiply-adds are not
    known, that factor is 1.
    """
    weights = np.array([float(group.numel) for group in profile.graph.groups])
    macs = group_macs(profile.graph)
    shares = weights / max(weights.max(initial=0.0), 1.0)
    effort = np.where(macs > 0, macs / max(macs.max(initial=0.0), 1.0), 1.0)
    worth: Scores = potential / np.maximum(shares * effort, 1e-12)
    return worth


@POLICIES.register("tinytrain")
class TinyTrainPolicy(Policy):
    """Train the head, and the best channels of the layers with most Fisher potential over size and multiply-adds.

    TinyTrain-style: the paper (Kwon et al., ICML 2024) gives the score and trains the channels of largest potential
    in the layers of largest score, but says neither how a budget is filled nor how many channels are trained.
    Assumed here: layers are visited by falling score, and each gets the largest share of 1, 1/2, 1/4 and 1/8 of its
    channels with which the plan so far still fits; it is skipped if none does. The head, which the paper replaces
    by class prototypes, is always trained whole; norms and all other groups that are no convolution or linear layer
    stay frozen.

    The limits are those of the budget. A budget without any limit means the paper's setting: 15 % of the
    multiply-adds of a full backward pass. The score ignores the path cost to a layer, and depthwise layers, small
    in both factors, win by far: compare `TinyTrainNoDepthwisePolicy`. The paper's output channels save time but no
    activations: compare `TinyTrainInputPolicy`.

    Attributes
    ----------
    name : str
        Name under which it is registered.
    axis : {"in", "out"}
        Which channels are chosen.
    exclude_depthwise : bool
        Whether depthwise convolutions stay frozen.
    fill : {"greedy", "random", "knapsack"}
        By falling score; in random order; or by the joint solver for most potential, whatever the score, if the
        costs of channel shares were measured.

    Parameters
    ----------
    macs_share : float, optional
        Multiply-adds of the backward pass over those of a full one, in (0, 1]; by default only the budget limits
        them.

    Raises
    ------
    PlanError
        If the share is invalid.
    """

    needs = Needs("fisher", tuple(Mode.channels(ratio, "out") for ratio in RATIOS[1:]), "fisher")
    name: ClassVar[str] = "tinytrain"
    axis: ClassVar[Axis] = "out"
    exclude_depthwise: ClassVar[bool] = False
    fill: ClassVar[Literal["greedy", "random", "knapsack"]] = "greedy"

    def __init__(self, macs_share: float | None = None) -> None:
        if macs_share is not None and not 0 < macs_share <= 1:
            raise PlanError(f"macs_share {macs_share} must be above 0 and at most 1")
        self.macs_share = macs_share

    def refuse_misfit(self, profile: CostProfile) -> None:
        """Raise PlanError for a model without a convolution or linear layer besides its head."""
        refuse_without_layers(self.name, profile.graph)

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan; raise BudgetError if not even the head fits memory or uplink."""
        offered = self._offered(request.profile)
        if self.fill == "knapsack":
            modes = self._most_potential(request, offered)
        else:
            modes = self._one_by_one(request, offered)
        return request.plan(self.name, modes)

    def _offered(self, profile: CostProfile) -> dict[int, tuple[Mode, ...]]:
        """Return the modes of each candidate layer, most expensive first."""
        layers = known_layers(profile)
        offered = channel_modes(profile, self.axis)
        depthwise = {g for g in offered if g in layers and layers[g].is_depthwise}
        return {g: m for g, m in offered.items() if not (self.exclude_depthwise and g in depthwise)}

    def _one_by_one(self, request: PlanRequest, offered: dict[int, tuple[Mode, ...]]) -> list[Mode]:
        modes = _head_alone(request)
        limit = self._macs_limit(request)
        for group in self._order(request, list(offered)):
            for mode in offered[group]:
                modes[group] = mode
                if self._fits(request, modes, limit):
                    break
                modes[group] = Mode.FROZEN
        return modes

    def _order(self, request: PlanRequest, candidates: list[int]) -> list[int]:
        if self.fill == "random":
            return [candidates[i] for i in request.generator.permutation(len(candidates))]
        worth = layer_worth(request.profile, request.importance)
        promising = [group for group in candidates if request.importance[group] > 0]
        # If nothing was measured yet, or nothing has any worth: nearest to the loss first.
        return sorted(promising, key=lambda group: -worth[group]) or candidates

    def _most_potential(
        self, request: PlanRequest, offered: dict[int, tuple[Mode, ...]]
    ) -> list[Mode]:
        """Return the joint solver's choice; while it does not fit, layers are removed, deepest first."""
        profile, budget = request.profile, request.budget
        options = group_options(request, self.needs.modes)
        available = options.choices.available.copy()
        for group in range(len(profile)):
            allowed = {Mode.FROZEN, *offered.get(group, ())}
            if group != profile.graph.head:
                available[group] &= [mode in allowed for mode in options.modes]
        choices = replace(options.choices, available=available)
        spend = request.allowed_step_seconds - profile.forward_seconds[0] - profile.fixed_seconds
        limit = self._macs_limit(request)
        if math.isinf(spend) and math.isfinite(limit):
            # The solver has one price for effort: multiply-adds replace seconds, which are not limited.
            choices, spend = _priced_in_macs(choices, options.modes, profile), limit
        limits = Limits(
            spend,
            math.inf if budget.memory is None else budget.memory,
            math.inf if budget.uplink is None else budget.uplink,
        )
        try:
            modes = options.modes_of(joint_knapsack(choices, limits).options)
            for _ in range(_RECOSTINGS if math.isfinite(limits.memory) else 0):
                # The solver adds up what a step never holds at the same time, so it may spend the difference.
                limits = replace(limits, memory=limits.memory + _spare_memory(request, modes))
                more = options.modes_of(joint_knapsack(choices, limits).options)
                if more == modes or not self._fits(request, more, limit):
                    break
                modes = more
        except BudgetError:
            return _head_alone(request)
        deepest_first = [g for g in reversed(range(len(modes))) if g != profile.graph.head]
        for group in deepest_first:
            if self._fits(request, modes, limit):
                break
            modes[group] = Mode.FROZEN
        return modes

    def _macs_limit(self, request: PlanRequest) -> float:
        share = self.macs_share
        if share is None and request.budget == Budget() and request.allowed_override is None:
            share = _DEFAULT_MACS_SHARE
        if share is None:
            return math.inf
        full = [Mode.FULL] * len(request.profile)
        return share * backward_macs(request.profile.graph, full)

    def _fits(self, request: PlanRequest, modes: Sequence[Mode], macs_limit: float) -> bool:
        if not request.fits_modes(modes):
            return False
        return macs_limit == math.inf or backward_macs(request.profile.graph, modes) <= macs_limit


@POLICIES.register("tinytrain_in")
class TinyTrainInputPolicy(TinyTrainPolicy):
    """TinyTrain-style with input channels, the only ones that save activations."""

    name = "tinytrain_in"
    axis = "in"
    needs = Needs("fisher", tuple(Mode.channels(ratio, "in") for ratio in RATIOS[1:]), "fisher")


@POLICIES.register("tinytrain_no_depthwise")
class TinyTrainNoDepthwisePolicy(TinyTrainPolicy):
    """TinyTrain-style, with depthwise convolutions frozen."""

    name = "tinytrain_no_depthwise"
    exclude_depthwise = True


@POLICIES.register("tinytrain_random")
class TinyTrainRandomPolicy(TinyTrainPolicy):
    """Layers in random order under the same limits: a baseline for the score."""

    needs = replace(TinyTrainPolicy.needs, importance=False)
    name = "tinytrain_random"
    fill = "random"


@POLICIES.register("tinytrain_learned")
class TinyTrainLearnedPolicy(TinyTrainPolicy):
    """TinyTrain-style, with Fisher potentials predicted from one forward pass by a pretrained network."""

    needs = replace(TinyTrainPolicy.needs, importance="learned", channel_score="learned")
    name = "tinytrain_learned"


@POLICIES.register("tinytrain_knapsack")
class TinyTrainKnapsackPolicy(TinyTrainPolicy):
    """The largest Fisher potential for the measured costs, by the joint solver."""

    name = "tinytrain_knapsack"
    fill = "knapsack"


def _priced_in_macs(choices: Choices, modes: Sequence[Mode], profile: CostProfile) -> Choices:
    """Return the choices with multiply-adds in place of seconds; branches are charged as one chain."""
    own = group_macs(profile.graph)
    shares = [0.0 if mode.is_frozen else mode.fraction for mode in modes]
    return replace(
        choices,
        seconds=own[:, None] * np.array(shares),
        path_seconds=np.concatenate([[0.0], own[:-1]]),
    )


def _spare_memory(request: PlanRequest, modes: Sequence[Mode]) -> float:
    """Return the bytes of the budget that a step in these modes does not use, at least 0."""
    assert request.budget.memory is not None
    taken = step_memory(request.profile, modes, lean=request.lean).total
    return max(request.budget.memory - taken, 0.0)


def _head_alone(request: PlanRequest) -> list[Mode]:
    modes = [Mode.FROZEN] * len(request.profile)
    modes[request.profile.graph.head] = Mode.FULL
    return modes
