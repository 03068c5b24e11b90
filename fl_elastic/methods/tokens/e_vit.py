"""The token level of Tri-Level E-ViT: train everything, with fewer tokens from block to block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from fl_elastic.methods.tokens.blocks import TokenBlock, token_blocks
from fl_elastic.methods.tokens.kept import KeptTokens
from fl_elastic.methods.tokens.policy import TokenPolicy, classes_of, with_tokens
from fl_elastic.planning.plan import Plan
from fl_elastic.planning.policy import POLICIES
from fl_elastic.planning.request import PlanRequest


@POLICIES.register("e_vit")
class EVitPolicy(TokenPolicy):
    """Train every group, and drop tokens behind a quarter, a half and three quarters of the blocks.

    After Tri-Level E-ViT (Kong et al., AAAI 2023): of the remaining tokens, those are kept that the class token
    attends to most, averaged over heads. Tokens are dropped behind a block, not before its perceptron. Of the other
    two levels, that of examples is left to the sampler, and masks on attention are left out because they cost time.
    The published share falls from epoch to epoch; here it is constant. A time budget is met with fewer steps.

    Parameters
    ----------
    keep : float
        Share of the remaining patches that is kept at each of the three places, rounded up.

    Raises
    ------
    PlanError
        If the share is invalid.
    """

    needs_coverage = False
    reduces_uplink = False
    basis = "kept tokens"
    name: ClassVar[str] = "e_vit"

    def __init__(self, keep: float = 0.9) -> None:
        KeptTokens((("", keep),))
        self.keep = keep

    def first_drop(self, blocks: Sequence[TokenBlock]) -> TokenBlock:
        """Return the block behind the first quarter of the blocks."""
        return _places(blocks)[0]

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan that trains everything on the kept tokens."""
        blocks = token_blocks(request.profile.graph)
        everything = np.ones(len(request.profile), dtype=bool)
        if len(blocks) < 2 or self.keep == 1:
            return request.plan_of_mask(self.name, everything)
        places = _places(blocks)
        drops = tuple((block.module, self.keep) for block in places)
        kept = KeptTokens(drops, classes_of(request, self.name))
        fewer = request.with_transform(kept)
        return with_tokens(fewer.plan_of_mask(self.name, everything), request, kept)


def _places(blocks: Sequence[TokenBlock]) -> list[TokenBlock]:
    """Return the blocks behind which tokens are dropped: of twelve the fourth, the seventh and the tenth."""
    depth = len(blocks)
    return [
        blocks[place] for place in sorted({depth // 4, depth // 2, depth * 3 // 4} - {depth - 1})
    ]
