"""Block selective reprogramming: train the last blocks of a transformer on the tokens that frozen ones point at."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import numpy as np

from fl_elastic.errors import PlanError
from fl_elastic.groups.token_blocks import TokenBlock, token_blocks
from fl_elastic.importance.base import Probe
from fl_elastic.planning.plan import Plan
from fl_elastic.planning.policy import POLICIES, PlanRequest, Policy
from fl_elastic.planning.policy_memory import PolicyMemory
from fl_elastic.planning.tokens import KeptTokens, kept_count
from fl_elastic.policies.tokens.proof import class_tokens
from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.fewer_tokens import fewer_tokens_profile

__all__ = ["BsrPolicy"]


@POLICIES.register("bsr")
class BsrPolicy(Policy):
    """Train the head and as many of the last blocks as fit, on the tokens that frozen blocks attend to.

    In the style of BSR (2024), whose abstract alone was read: blocks of a pretrained vision transformer are frozen,
    and tokens left out by the attention of a frozen one. Here that is the last frozen block, and its class token's
    attention, the mean over its heads. What is frozen runs as inference, so that the same tokens of an example stay
    in every epoch; features that are kept are those of these tokens alone.

    Parameters
    ----------
    keep : float
        Share of the tokens besides the class token that stays, rounded up.
    fraction : float
        Share of the blocks that are trained at most, rounded up; at least one stays frozen.

    Raises
    ------
    PlanError
        If a share is impossible.
    """

    covers = False
    still_prefix = True
    basis = "last blocks, kept tokens"
    name: ClassVar[str] = "bsr"

    def __init__(self, keep: float = 0.5, fraction: float = 0.5) -> None:
        KeptTokens((("", keep),))
        if not 0 < fraction <= 1:
            raise PlanError(f"fraction {fraction} of the blocks must be above 0 and at most 1")
        self.keep, self.fraction = keep, fraction

    def refuse_misfit(self, profile: CostProfile) -> None:
        """Raise PlanError for a model that is no chain of at least two blocks."""
        found = len(token_blocks(profile.graph))
        if found < 2:
            raise PlanError(
                f"policy {self.name!r} trains the last blocks of a transformer; {found} were found in this model: "
                "modules that hand one sequence of tokens on, of shape (N, tokens, width), with one attention over "
                "all tokens in each, and no part of the model held back from training; use policy 'elastic'"
            )

    def observe(self, probe: Probe, profile: CostProfile, memory: PolicyMemory) -> PolicyMemory:
        """Find out, by running it, from how many tokens the model answers.

        Raises
        ------
        PlanError
            If the model may not go on with some of its tokens.
        """
        del memory
        blocks = token_blocks(profile.graph)
        first = blocks[len(blocks) - self._most(len(blocks)) - 1]
        classes = class_tokens(probe.model, probe.loss_fn, probe.batches[0], blocks, first)
        return PolicyMemory(self.name, {"classes": classes})

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan of the most blocks that fit, or of the head alone; BudgetError if nothing fits."""
        blocks = token_blocks(request.profile.graph)
        classes = int(request.memory.of(self.name).facts.get("classes", 1))
        for count in range(self._most(len(blocks)), 0, -1):
            block = blocks[len(blocks) - count - 1]
            fewer = self._fewer(request, block, classes)
            mask = np.arange(len(request.profile)) < block.groups_above
            if block.groups_above <= len(request.profile) and fewer.fits(mask):
                return replace(
                    fewer.plan_of_mask(self.name, mask),
                    full_step_seconds=request.profile.full_step_seconds,
                    floor_step_seconds=request.profile.floor_step_seconds,
                    tokens=KeptTokens(((block.module, self.keep),), classes),
                )
        return request.plan_of_mask(self.name, request.head_mask())

    def _most(self, blocks: int) -> int:
        return max(0, min(math.ceil(self.fraction * blocks), blocks - 1))

    def _fewer(self, request: PlanRequest, block: TokenBlock, classes: int) -> PlanRequest:
        """Return the request for steps that go on with the kept tokens behind a block."""
        count = classes + kept_count(block.tokens - classes, self.keep)
        return replace(
            request.allowing(request.allowed_step_seconds),
            profile=fewer_tokens_profile(request.profile, [(block, count)]),
        )
