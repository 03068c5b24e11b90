"""Choose layers by Fisher potential over size and multiply-adds, then their best channels: TinyTrain-style."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from fl_elastic.budget import Budget
from fl_elastic.errors import PlanError
from fl_elastic.groups import Mode
from fl_elastic.groups.mode import Axis
from fl_elastic.planning.channel_modes import (
    RATIOS,
    channel_modes,
    refuse_without_layers,
)
from fl_elastic.planning.importance.base import Scores
from fl_elastic.planning.plan import Plan
from fl_elastic.planning.policy import POLICIES, Needs, Policy
from fl_elastic.planning.request import PlanRequest
from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.macs import backward_macs, group_macs

_DEFAULT_MACS_SHARE = 0.15


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
    """Train the head, and the best channels of the layers with the largest Fisher potential per size and operation.

    TinyTrain-style: the paper (Kwon et al., ICML 2024) gives the score and trains the channels of largest potential
    in the layers of largest score, but says neither how a budget is filled nor how many channels are trained.
    Assumed here: layers are visited by falling score. Each gets the largest share of its channels, among 1, 1/2,
    1/4 and 1/8, with which the plan still fits; it is skipped if none does. The head, which the paper replaces by
    class prototypes, is always trained whole; norms and all other groups that are not convolutions or linear layers
    stay frozen.

    The limits are those of the budget. A budget without any limit means the paper's setting: 15 % of the
    multiply-adds of a full backward pass. The score ignores the path cost to a layer. Depthwise layers, which are
    small in both factors, get by far the highest scores. The paper's output channels save time but no activations;
    see `TinyTrainInputPolicy`.

    Attributes
    ----------
    name : str
        Name under which it is registered.
    axis : {"in", "out"}
        Which channels are chosen.

    Parameters
    ----------
    macs_share : float, optional
        Limit of the multiply-adds of the backward pass over those of a full one, in (0, 1]; by default only the
        budget limits them.

    Raises
    ------
    PlanError
        If the share is invalid.
    """

    needs = Needs("fisher", tuple(Mode.channels(ratio, "out") for ratio in RATIOS[1:]), "fisher")
    name: ClassVar[str] = "tinytrain"
    axis: ClassVar[Axis] = "out"

    def __init__(self, macs_share: float | None = None) -> None:
        if macs_share is not None and not 0 < macs_share <= 1:
            raise PlanError(f"macs_share {macs_share} must be above 0 and at most 1")
        self.macs_share = macs_share

    def refuse_misfit(self, profile: CostProfile) -> None:
        """Raise PlanError for a model without a convolution or linear layer besides its head."""
        refuse_without_layers(self.name, profile.graph)

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan; raise BudgetError if not even the head fits memory or uplink."""
        modes, limit = [Mode.FROZEN] * len(request.profile), self._macs_limit(request)
        modes[request.profile.graph.head] = Mode.FULL
        offered = channel_modes(request.profile, self.axis)
        for group in _by_worth(request, list(offered)):
            for mode in offered[group]:
                modes[group] = mode
                if self._fits(request, modes, limit):
                    break
                modes[group] = Mode.FROZEN
        return request.plan(self.name, modes)

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
    """TinyTrain-style with input channels, which save activations, unlike output channels."""

    name = "tinytrain_in"
    axis = "in"
    needs = Needs("fisher", tuple(Mode.channels(ratio, "in") for ratio in RATIOS[1:]), "fisher")


def _by_worth(request: PlanRequest, candidates: list[int]) -> list[int]:
    """Return the candidates with positive worth, largest first; all in backward order if there are none."""
    worth = layer_worth(request.profile, request.importance)
    promising = [group for group in candidates if request.importance[group] > 0]
    # If nothing was measured yet, or nothing has any worth: nearest to the loss first.
    return sorted(promising, key=lambda group: -worth[group]) or candidates
