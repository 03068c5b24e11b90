"""Block selective reprogramming: train the last blocks of a transformer on the tokens that frozen ones point at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from fl_elastic.errors import PlanError
from fl_elastic.methods.tokens.blocks import TokenBlock, token_blocks
from fl_elastic.methods.tokens.kept import KeptTokens
from fl_elastic.methods.tokens.policy import TokenPolicy, classes_of, with_tokens
from fl_elastic.planning.plan import Plan
from fl_elastic.planning.policy import POLICIES
from fl_elastic.planning.request import PlanRequest

__all__ = ["BsrPolicy"]


@POLICIES.register("bsr")
class BsrPolicy(TokenPolicy):
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

    needs_coverage = False
    needs_eval_prefix = True
    basis = "last blocks, kept tokens"
    name: ClassVar[str] = "bsr"

    def __init__(self, keep: float = 0.5, fraction: float = 0.5) -> None:
        KeptTokens((("", keep),))
        if not 0 < fraction <= 1:
            raise PlanError(f"fraction {fraction} of the blocks must be above 0 and at most 1")
        self.keep, self.fraction = keep, fraction

    def first_drop(self, blocks: Sequence[TokenBlock]) -> TokenBlock:
        """Return the last frozen block where as many as possible are trained."""
        return blocks[len(blocks) - self._most(len(blocks)) - 1]

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan of the most blocks that fit, or of the head alone; BudgetError if nothing fits."""
        blocks = token_blocks(request.profile.graph)
        for count in range(self._most(len(blocks)), 0, -1):
            block, lowest = blocks[len(blocks) - count - 1 :][:2]
            if block.groups_above == lowest.groups_above:
                # Held back from training, as below the fleet's cut: a later one is the last that is frozen.
                continue
            kept = KeptTokens(((block.module, self.keep),), classes_of(request, self.name))
            fewer = request.with_transform(kept)
            mask = np.arange(len(request.profile)) < block.groups_above
            if fewer.fits(mask):
                return with_tokens(fewer.plan_of_mask(self.name, mask), request, kept)
        return request.plan_of_mask(self.name, request.head_mask())

    def _most(self, blocks: int) -> int:
        return max(0, min(math.ceil(self.fraction * blocks), blocks - 1))
