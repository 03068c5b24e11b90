"""Block selective reprogramming: train the last blocks of a transformer on tokens chosen by frozen blocks."""

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


@POLICIES.register("bsr")
class BsrPolicy(TokenPolicy):
    """Train the head and as many of the last blocks as fit, on the tokens that a frozen block attends to.

    In the style of BSR (2024), of which only the abstract was read: blocks of a pretrained vision transformer are
    frozen, and tokens are dropped by the attention of a frozen block. Here this is the last frozen block, and its
    class token's attention averaged over heads. Frozen parts run as inference, so an example keeps the same tokens
    in every epoch, and kept features are those of these tokens only.

    Parameters
    ----------
    keep : float
        Share of the tokens, without the class token, that are kept, rounded up.
    fraction : float
        Largest share of the blocks that is trained, rounded up; at least one block stays frozen.

    Raises
    ------
    PlanError
        If a share is invalid.
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
        """Return the last frozen block if as many blocks as possible are trained."""
        return blocks[len(blocks) - self._most(len(blocks)) - 1]

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan with the most blocks that fit, or the head alone; raise BudgetError if nothing fits."""
        blocks = token_blocks(request.profile.graph)
        for count in range(self._most(len(blocks)), 0, -1):
            block, lowest = blocks[len(blocks) - count - 1 :][:2]
            if block.groups_above == lowest.groups_above:
                # That block may not be trained, as below the fleet's cut: a later block is the last frozen one.
                continue
            kept = KeptTokens(((block.module, self.keep),), classes_of(request, self.name))
            fewer = request.with_transform(kept)
            mask = np.arange(len(request.profile)) < block.groups_above
            if fewer.fits(mask):
                return with_tokens(fewer.plan_of_mask(self.name, mask), request, kept)
        return request.plan_of_mask(self.name, request.head_mask())

    def _most(self, blocks: int) -> int:
        return max(0, min(math.ceil(self.fraction * blocks), blocks - 1))
