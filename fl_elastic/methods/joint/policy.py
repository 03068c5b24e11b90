"""The joint policy: it chooses every group's mode (frozen, bias, channels, full) and which blocks to recompute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from fl_elastic.errors import BudgetError
from fl_elastic.groups import Mode
from fl_elastic.groups.graph import Block
from fl_elastic.planning.elastic import ElasticPolicy, costlier_steps
from fl_elastic.planning.group_options import GroupOptions, group_options
from fl_elastic.planning.multiple_choice.choices import ChoiceLimits
from fl_elastic.planning.multiple_choice.knapsack import multiple_choice_knapsack
from fl_elastic.planning.plan import Plan
from fl_elastic.planning.policy import POLICIES, Needs, Policy
from fl_elastic.planning.recompute import candidate_blocks
from fl_elastic.planning.request import PlanRequest
from fl_elastic.profiling.memory import inference_bytes, recompute_seconds, step_memory

STANDARD_MODES = tuple(Mode.parse(text) for text in ("bias", "in/2", "in/4", "in/8"))
"""Modes beside frozen and full."""
_RECOSTINGS = 3
_TOLERANCE = 0.01


@dataclass(frozen=True)
class _Found:
    modes: tuple[Mode, ...]
    blocks: tuple[Block, ...]
    value: float
    seconds: float


@POLICIES.register("joint")
class JointPolicy(Policy):
    """Choose the modes of all groups jointly, under time, memory and uplink limits.

    The multiple-choice solver charges branches as one chain, and a shared stored tensor to each layer that uses it.
    The costs of its answer are then computed on the real graph, and it solves again with the budget that is left.
    Under a memory limit different numbers of recomputed blocks are tried; blocks that save most come first. If
    fewer steps may be taken, the plan maximises its value times the gain of the steps that fit (see
    `fl_elastic.planning.request.STEP_GAIN_EXPONENT`), as policy "elastic" does.
    """

    needs = Needs(importance=True, modes=STANDARD_MODES, fidelity=True)

    def plan(self, request: PlanRequest) -> Plan:
        """Return the best plan found."""
        requests = [request]
        full = request.profile.full_step_seconds
        if request.may_trade_steps and request.allowed_step_seconds < full:
            requests += costlier_steps(request)
        found: list[_Found] = []
        for blocks in _recomputations(request):
            options = group_options(request, self.needs.modes, blocks)
            for each in requests:
                # The solver's sums are upper bounds, so a selection that it refuses may still fit.
                with suppress(BudgetError):
                    found += _solutions(each, options, blocks)
        if request.fits_bytes(request.head_mask()):
            # The solver overestimates the costs of branches and the peak of a step: more groups, trained whole, may
            # fit.
            whole = ElasticPolicy().plan(request)
            seconds = request.profile.plan_seconds(whole.modes)
            value = float(request.importance[whole.mask].sum())
            found.append(_Found(whole.modes, (), value, seconds))
        if not found:
            found = [_head(request, group_options(request, self.needs.modes))]

        def worth(one: _Found) -> float:
            return one.value * request.gain_of(one.modes, one.seconds)

        best = max(found, key=worth)
        return request.plan("joint", best.modes, best.blocks)


def _recomputations(request: PlanRequest) -> Iterator[tuple[Block, ...]]:
    """Yield sets of blocks to recompute: none, and under a memory limit more and more of them."""
    yield ()
    memory = request.budget.memory
    everything = [Mode.FULL] * len(request.profile)
    if memory is None or step_memory(request.profile, everything, lean=True).total <= memory:
        return
    saved = request.profile.node_saved_bytes
    blocks = sorted(
        candidate_blocks(request.profile),
        key=lambda block: float(saved[list(block.nodes)].sum()),
        reverse=True,
    )
    for count in sorted({1, len(blocks) // 4, len(blocks) // 2, len(blocks)} - {0}):
        if count <= len(blocks):
            yield tuple(blocks[:count])


def _solutions(
    request: PlanRequest, options: GroupOptions, blocks: Sequence[Block]
) -> Iterator[_Found]:
    """Yield selections that fit on the real graph, each solved with the budget that the previous one left."""
    profile, budget = request.profile, request.budget
    constant = float(profile.forward_seconds[0]) + profile.fixed_seconds
    allowed = request.allowed_step_seconds - constant
    floor = profile.floor_step_seconds - constant
    spend = max(allowed, floor * (1 + 1e-9))
    room = np.inf if budget.memory is None else budget.memory
    uplink = np.inf if budget.uplink is None else budget.uplink
    # The solver adds up tensors that never exist at the same time, and does not subtract the memory of inference.
    memory_spend = room + inference_bytes(profile)
    for _ in range(_RECOSTINGS):
        selection = multiple_choice_knapsack(
            options.choices, ChoiceLimits(spend, memory_spend, uplink)
        )
        modes = tuple(options.modes_of(selection.options))
        used = tuple(block for block in blocks if _is_used(request, modes, block))
        again = sum(recompute_seconds(profile, block) for block in used)
        seconds = profile.plan_seconds(modes) + again
        kept = step_memory(profile, modes, lean=request.lean, recomputed=used).total
        fits = seconds - constant <= max(allowed, floor) * (1 + 1e-9) and kept <= room
        if fits:
            yield _Found(modes, used, selection.totals.value, seconds)
        left = allowed - (seconds - constant)
        slack = 0.0 if np.isinf(allowed) else left / max(abs(allowed), 1e-12)
        spare = 0.0 if np.isinf(room) else (room - kept) / room
        if fits and slack < _TOLERANCE and spare < _TOLERANCE:
            break
        if np.isfinite(spend):
            spend = max(spend + left, floor * (1 + 1e-9))
        if np.isfinite(memory_spend):
            memory_spend = max(memory_spend + room - kept, 0.0)


def _is_used(request: PlanRequest, modes: Sequence[Mode], block: Block) -> bool:
    """Return whether the error gradient reaches the block; below the deepest trained group nothing is stored."""
    running, _ = request.profile.running_nodes(np.array([not mode.is_frozen for mode in modes]))
    return bool(running[list(block.nodes)].any())


def _head(request: PlanRequest, options: GroupOptions) -> _Found:
    """Return the head alone, in the mode of most worth that fits memory and uplink.

    Raises
    ------
    BudgetError
        If no mode fits.
    """
    profile, budget, head = request.profile, request.budget, request.profile.graph.head
    worth, offered = options.choices.value[head], options.choices.available[head].copy()
    offered[0] = False
    needs: list[tuple[float, float]] = []
    for column in sorted(np.flatnonzero(offered).tolist(), key=lambda each: -worth[each]):
        modes = [Mode.FROZEN] * len(profile)
        modes[head] = options.modes[column]
        memory = step_memory(profile, modes, lean=request.lean).total
        needs.append((memory, request.uplink_bytes(modes)))
        limits = (budget.memory, budget.uplink)
        if all(
            limit is None or need <= limit for need, limit in zip(needs[-1], limits, strict=True)
        ):
            seconds = profile.plan_seconds(modes)
            return _Found(tuple(modes), (), float(worth[column]), seconds)

    def excess(need: tuple[float, float]) -> float:
        return max(need[0] / (budget.memory or np.inf), need[1] / (budget.uplink or np.inf))

    raise request.refusal("not even the head fits:", *min(needs, key=excess))
