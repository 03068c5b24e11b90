"""The elastic policy: the most important groups that fit the measured budget."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from fl_elastic.planning.importance.base import Scores
from fl_elastic.planning.knapsack import prefix_knapsack
from fl_elastic.planning.plan import Plan
from fl_elastic.planning.policy import POLICIES, Needs, Policy
from fl_elastic.planning.request import PlanRequest
from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.memory import mask_bytes
from fl_elastic.profiling.profile import Mask, Seconds

# Most knapsacks solved for one allowed time, each with the slack that the previous one left; and the share of this
# time below which slack is not worth another knapsack.
_RECOSTINGS, _SLACK = 4, 0.01
# If fewer, costlier steps may pay: most step times that are tried; the share of the best plan's expected decrease
# that a first guess must be able to reach; and how many of the best guesses are filled up.
_ALLOWANCES, _NEAR, _FILLED = 6, 0.9, 2
# Resolution of the knapsack, and of knapsacks that are only solved to find a price.
_FINE, _COARSE = 4096, 512
# Up to this many groups every choice is tried; more are possible if the memory need not be computed for each.
_FEW, _MORE_WITHOUT_MEMORY = 8, 4
# Most groups of a model in which single groups are exchanged, and in which pairs are: with more, this takes too
# long.
_MOST_EXCHANGED, _MOST_IN_PAIRS = 40, 20
# Most exchanges. For each: most candidates tried, number of candidates tried at once, and most candidates filled
# up.
_EXCHANGES, _MOST_TRIED, _AT_ONCE, _MOST_FILLED = 20, 1024, 256, 24
# Number of profiles whose bytes are cached: enough for the plans of one fit.
_PROFILES = 8


@POLICIES.register("elastic")
class ElasticPolicy(Policy):
    """Train the head and the most important of the other groups that the budget pays for.

    The prefix knapsack charges parallel branches as one chain. So its answer is re-costed on the real graph, the
    knapsack is solved again with the time that is left, and the remaining time is filled group by group. On a
    chain, with only a time limit or only an uplink limit, the result is optimal up to the solver's rounding. With
    branches it need not be: in models of up to 40 groups, groups are exchanged for more important ones that fit.
    Under a memory or uplink budget, each group's bytes get a price. Under a memory budget the most important groups
    that fit, and those of most importance per byte of their own memory, are tried as well. If everything fits,
    everything is trained.

    If fewer steps may be taken (under a deadline, or if even the cheapest step is too long for the speed-up), the
    plan maximises importance times the gain of the steps that fit. Near the floor most of a step is spent on the
    forward pass whatever is trained, and fewer, deeper steps decrease the loss more per second.

    In a model of up to 12 groups, 8 under a memory budget, every choice is tried.
    """

    needs = Needs(importance=True)

    def plan(self, request: PlanRequest) -> Plan:
        """Return the best plan found; it is worth at least as much as the best suffix next to the loss."""
        everything = np.ones(len(request.profile), dtype=bool)
        if request.fits(everything):
            return request.plan_of_mask("elastic", everything)
        if not request.fits_bytes(request.head_mask()):
            raise request.head_refusal()
        if len(request.profile) <= _FEW + _MORE_WITHOUT_MEMORY * (request.budget.memory is None):
            return request.plan_of_mask("elastic", _best_of_all(request))
        search = _Search(request)
        best, suffix = search.within(request), _best_suffix(request)
        assert best is not None
        if request.importance[suffix].sum() > request.importance[best].sum():
            best = suffix
        best = _exchanged(request, _fill(request, best))
        if (
            request.may_trade_steps
            and request.allowed_step_seconds < request.profile.full_step_seconds
        ):
            best = self._with_fewer_steps(request, search, best)
        return request.plan_of_mask("elastic", best)

    def _with_fewer_steps(self, request: PlanRequest, search: _Search, best: Mask) -> Mask:
        """Return the mask of largest expected decrease among ``best`` and masks with fewer, costlier steps."""
        value = request.expected_decrease(best)
        shorter = max(request.allowed_step_seconds, request.profile.floor_step_seconds)
        found: list[tuple[float, int, PlanRequest, Mask]] = []
        for costlier in costlier_steps(request):
            # Masks that fit the previous allowed time have been tried. The steps of any other mask are longer, so
            # its gain is at most this one.
            gain = request.gain(request.allowed_step_seconds / shorter)
            shorter = costlier.allowed_step_seconds
            at_least = _NEAR * value / max(gain, 1e-12)
            mask = search.within(costlier, at_least, _COARSE)
            if mask is not None:
                found.append((request.expected_decrease(mask), len(found), costlier, mask))
        for _, _, costlier, mask in sorted(found, reverse=True)[:_FILLED]:
            filled = _exchanged(costlier, _fill(costlier, mask))
            if (worth := request.expected_decrease(filled)) > value:
                best, value = filled, worth
        return best


@dataclass
class _Search:
    """Solves the knapsack under limits on bytes as well, by putting a price on each byte.

    The price and the slack found for one allowed step time are the first guess for the next one, so that few
    knapsacks have to be solved.
    """

    request: PlanRequest
    price: float = 0.0
    hidden: float = 0.0

    @cached_property
    def worth(self) -> Scores:
        """Importance; zero for groups that may not be trained, or whose bytes do not fit beside the head's."""
        request = self.request
        worth = request.importance.copy()
        if request.reachable is not None:
            worth[request.reachable :] = 0.0
        uplink, memory = request.budget.uplink, request.budget.memory
        sent = request.profile.sent_bytes
        if uplink is not None:
            worth[(sent[request.head_mask()].sum() + sent) * ~request.head_mask() > uplink] = 0.0
        if memory is not None:
            alone = _bytes_beside_head(request.profile, request.lean)
            worth[(alone > memory) & ~request.head_mask()] = 0.0
        return worth

    def within(
        self, request: PlanRequest, at_least: float = -np.inf, resolution: int = _FINE
    ) -> Mask | None:
        """Return the mask of most worth that fits time and bytes; None if its worth is below ``at_least``."""
        if float(self.worth.clip(min=0.0).sum()) < at_least:
            return None
        best = self._in_time(request, self.worth, resolution)
        if float(self.worth[best].sum()) < at_least:
            return None
        if request.fits_bytes(best):
            return best
        sizes = request.profile.sent_bytes
        # The choice between groups only changes where the price crosses the worth per byte of one of them. A set,
        # because numpy's unique loads a megabyte of masked arrays.
        prices = np.array(sorted({*(self.worth / sizes)[self.worth > 0].tolist()}))
        best, value = request.head_mask(), -np.inf
        low, high = 0, len(prices)
        middle = int(np.searchsorted(prices, self.price)) if self.price else high // 2
        while low < high:
            middle = min(max(middle, low), high - 1)
            mask = self._in_time(request, self.worth - prices[middle] * sizes, _COARSE)
            if request.fits_bytes(mask):
                found = float(self.worth[mask].sum())
                if found > value:
                    best, value, self.price = mask, found, float(prices[middle])
                high = middle
            else:
                low = middle + 1
            middle = (low + high) // 2
        masks = [best]
        if request.budget.uplink is not None:
            masks += self._by_uplink(request)
        if request.budget.memory is not None:
            masks += _by_worth_and_memory(request, self.worth)
        return max(masks, key=lambda mask: float(self.worth[mask].sum()))

    def _by_uplink(self, request: PlanRequest) -> list[Mask]:
        """Return the mask of most worth within the uplink in a list, empty if time or memory is exceeded."""
        sizes, uplink = request.profile.sent_bytes, request.budget.uplink
        assert uplink is not None
        found = prefix_knapsack(
            sizes, np.zeros(len(sizes)), self.worth, uplink,
            forced=np.flatnonzero(request.head_mask()).tolist(),
        )  # fmt: skip
        return [found.mask] if request.fits(found.mask) else []

    def _in_time(self, request: PlanRequest, worth: Scores, resolution: int) -> Mask:
        """Solve the knapsack, re-cost it on the real graph, and solve again with the slack of parallel branches."""
        profile = request.profile
        constant = float(profile.forward_seconds[0]) + profile.fixed_seconds
        whole = float(profile.update_seconds.sum() + profile.path_seconds.sum())
        allowed = min(request.allowed_step_seconds - constant, whole)
        best, best_value, spend = request.head_mask(), -np.inf, allowed + self.hidden
        for _ in range(_RECOSTINGS):
            found = prefix_knapsack(
                profile.update_seconds, profile.path_seconds, worth, max(spend, 0.0),
                forced=[profile.graph.head], resolution=resolution,
            )  # fmt: skip
            actual = profile.step_seconds(found.mask) - constant
            if actual <= allowed * (1 + 1e-9) and found.value > best_value:
                best, best_value = found.mask, found.value
            slack = allowed - actual
            if abs(slack) <= _SLACK * abs(allowed):
                break
            spend += slack
            if resolution == _COARSE and actual <= allowed:
                # While prices are tried, assume that branches save as much as before.
                self.hidden = max(found.cost - actual, 0.0)
                break
        return best


def _best_of_all(request: PlanRequest) -> Mask:
    """Return the best of all masks that train the head; the cheapest of equally good ones."""
    head, count = request.head_mask(), len(request.profile)
    masks: Mask = (np.arange(2**count)[:, None] >> np.arange(count) & 1).astype(bool)
    masks = masks[(masks | ~head).all(axis=1)]
    if request.reachable is not None:
        masks = masks[~(masks & ~head)[:, request.reachable :].any(axis=1)]
    seconds = request.profile.seconds_of(masks)
    in_time = seconds <= request.allowed_step_seconds * (1 + 1e-9)
    if request.may_trade_steps:
        worth = request.expected_decreases(masks)
    else:
        worth = np.where(in_time, masks @ request.importance, -np.inf)
    for index in np.lexsort((seconds, -worth)).tolist():
        if request.fits_bytes(masks[index]):
            head = masks[index]
            break
    return head


@lru_cache(maxsize=_PROFILES)
def _bytes_beside_head(profile: CostProfile, lean: bool) -> Seconds:
    """Return for each group the bytes that a step keeps if it trains the head and this group."""
    found = np.zeros(len(profile))
    for group in range(len(profile)):
        mask = np.zeros(len(profile), dtype=bool)
        mask[[profile.graph.head, group]] = True
        found[group] = mask_bytes(profile, mask, lean=lean)
    return found


def costlier_steps(request: PlanRequest) -> list[PlanRequest]:
    """Return requests with longer allowed step times, up to a full step, such that a whole number of steps fits."""
    lowest = max(request.allowed_step_seconds, request.profile.floor_step_seconds)
    total = request.allowed_step_seconds * request.steps
    longest = request.profile.full_step_seconds
    most, fewest = int(total / lowest + 1e-9), max(int(np.ceil(total / longest - 1e-9)), 1)
    counts = np.arange(fewest, most + 1)
    if len(counts) > _ALLOWANCES:
        counts = np.geomspace(fewest, most, _ALLOWANCES).round().astype(int)
    allowances = sorted({min(total / count, longest) for count in counts.tolist()} | {longest})
    return [
        request.allowing(allowance * (1 + 1e-9)) for allowance in allowances if allowance >= lowest
    ]


def _best_suffix(request: PlanRequest) -> Mask:
    """Return the suffix (the first groups, next to the loss) of most worth among those that fit."""
    order = np.arange(len(request.profile))
    counts = range(_most_that_fit(request, order) + 1)
    suffixes = [_beside_head(request, order[:count]) for count in counts]
    return max(suffixes, key=lambda mask: float(request.importance[mask].sum()))


def _by_worth_and_memory(request: PlanRequest, worth: Scores) -> list[Mask]:
    """Return two masks that fit: the groups of most worth, and those of most worth per byte that each takes alone.

    The search puts a price on the bytes of weights alone, but activations are not proportional to them.
    """
    worth, found = np.where(request.head_mask(), 0.0, worth.clip(min=0)), []
    for density in (worth, worth / _bytes_beside_head(request.profile, request.lean)):
        order = np.argsort(-density, kind="stable")[: np.count_nonzero(density)]
        found.append(_beside_head(request, order[: _most_that_fit(request, order)]))
    return found


def _most_that_fit(request: PlanRequest, order: NDArray[np.int64]) -> int:
    """Return how many groups fit beside the head, taken in this order; costs never fall as groups are added."""
    counts = range(1, len(order) + 1)
    return bisect_left(
        counts, True, key=lambda count: not request.fits(_beside_head(request, order[:count]))
    )


def _beside_head(request: PlanRequest, groups: NDArray[np.int64]) -> Mask:
    mask = request.head_mask()
    mask[groups] = True
    return mask


def _fill(request: PlanRequest, mask: Mask, closed: Sequence[int] = ()) -> Mask:
    """Add groups while they fit, those of most importance per second first; ``closed`` groups are not added."""
    mask, profile = mask.copy(), request.profile
    allowed = request.allowed_step_seconds * (1 + 1e-9)
    depth = int(np.flatnonzero(mask)[-1])
    # Approximate extra time: the group's own gradient, and the path to it from the deepest trained group, which is
    # shorter where branches are parallel.
    reach = np.cumsum(profile.path_seconds)
    extra = profile.update_seconds + np.maximum(reach - reach[depth], 0.0)
    density = np.where(mask, 0.0, request.importance.clip(min=0) / np.maximum(extra, 1e-12))
    if request.reachable is not None:
        density[request.reachable :] = 0.0
    density[[*closed]] = 0.0
    left = np.argsort(-density, kind="stable")[: np.count_nonzero(density)]
    while len(left):
        with_one = np.repeat(mask[None], len(left), axis=0)
        with_one[np.arange(len(left)), left] = True
        # A step only gets longer as groups are added, so a group that is too expensive now stays so.
        left = left[profile.seconds_of(with_one) <= allowed]
        while len(left):
            group, left = left[0], left[1:]
            mask[group] = True
            if request.fits_bytes(mask):
                break
            mask[group] = False
    return mask


def _exchanged(request: PlanRequest, mask: Mask) -> Mask:
    """Exchange one group or two for one of more worth as long as that fits on the real graph, and fill the rest.

    The knapsack treats the graph as a chain, in which branches cost more than in reality, so its best selection
    need not be the best on the real graph.
    """
    if len(mask) > _MOST_EXCHANGED:
        return mask
    worth, head = request.importance.clip(min=0), request.head_mask()
    allowed = request.allowed_step_seconds * (1 + 1e-9)
    open_to = worth > 0
    if request.reachable is not None:
        open_to[request.reachable :] = False
    for _ in range(_EXCHANGES):
        given, taken = np.flatnonzero(mask & ~head), np.flatnonzero(~mask & open_to)
        left: list[tuple[int, ...]] = [(each,) for each in given.tolist()]
        if len(mask) <= _MOST_IN_PAIRS:
            left += combinations(given.tolist(), 2)
        gains = worth[taken][:, None] - [float(worth[[*each]].sum()) for each in left]
        order = np.argsort(-gains, axis=None, kind="stable")[: np.count_nonzero(gains > 0)]
        for start in range(0, min(len(order), _MOST_TRIED), _AT_ONCE):
            into, out = np.unravel_index(order[start : start + _AT_ONCE], gains.shape)
            masks = np.repeat(mask[None], len(into), axis=0)
            masks[np.arange(len(into)), taken[into]] = True
            for row, place in enumerate(out.tolist()):
                masks[row, [*left[place]]] = False
            fitting = np.flatnonzero(request.profile.seconds_of(masks) <= allowed).tolist()
            found = next((masks[row] for row in fitting if request.fits_bytes(masks[row])), None)
            if found is not None:
                break
        else:
            value = float(worth[mask].sum())
            others = (_without(request, mask, each) for each in left[:_MOST_FILLED])
            found = next(
                (other for other in others if worth[other].sum() > value * (1 + 1e-9)), None
            )
            if found is None:
                return mask
        mask = _fill(request, found)
    return mask


def _without(request: PlanRequest, mask: Mask, given: tuple[int, ...]) -> Mask:
    """Return the mask without the ``given`` groups, filled with others."""
    mask = mask.copy()
    mask[[*given]] = False
    return _fill(request, mask, given)
