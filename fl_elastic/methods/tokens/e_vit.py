"""The token level of Tri-Level E-ViT: train everything, with fewer tokens from block to block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from fl_elastic.errors import PlanError
from fl_elastic.methods.tokens.blocks import TokenBlock, token_blocks
from fl_elastic.methods.tokens.kept import KeptTokens, cosine_share
from fl_elastic.methods.tokens.policy import TokenPolicy, classes_of, with_tokens
from fl_elastic.planning.importance.base import Probe
from fl_elastic.planning.plan import Plan
from fl_elastic.planning.policy import POLICIES
from fl_elastic.planning.request import PlanRequest, PolicyMemory
from fl_elastic.profiling import CostProfile


@POLICIES.register("e_vit")
class EVitPolicy(TokenPolicy):
    """Train every group, and drop tokens behind a quarter, a half and three quarters of the blocks.

    After Tri-Level E-ViT (Kong et al., AAAI 2023): of the remaining tokens, those are kept that the class token
    attends to most, averaged over heads. Tokens are dropped behind a block, not before its perceptron. The example
    level is `fl_elastic.methods.tokens.active_examples.ActiveExamples`. The third level, masks on attention, is
    left out because it costs time. A time budget is met with fewer steps.

    Parameters
    ----------
    keep : float
        Share of the remaining patches that is kept at each of the three places, rounded up.
    fits : int, optional
        Total number of fits, such as rounds or epochs. The share then begins at 1 and falls from a thirtieth of
        them on, see `cosine_share`; within a fit it is constant. By default it is ``keep`` from the first fit on.

    Raises
    ------
    PlanError
        If a parameter is invalid.
    """

    needs_coverage = False
    reduces_uplink = False
    basis = "kept tokens"
    name: ClassVar[str] = "e_vit"

    def __init__(self, keep: float = 0.9, fits: int | None = None) -> None:
        KeptTokens((("", keep),))
        if fits is not None and fits < 1:
            raise PlanError(f"fits {fits} must be at least 1")
        self.keep, self.fits = keep, fits

    def first_drop(self, blocks: Sequence[TokenBlock]) -> TokenBlock:
        """Return the block behind the first quarter of the blocks."""
        return _places(blocks)[0]

    def observe(self, probe: Probe, profile: CostProfile, memory: PolicyMemory) -> PolicyMemory:
        """Run the model to find its class tokens, and count the fits."""
        found = super().observe(probe, profile, memory)
        return PolicyMemory(self.name, {**found.facts, "fits": int(found.facts.get("fits", 0)) + 1})

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan that trains everything on the tokens that are kept at present."""
        blocks, share = token_blocks(request.profile.graph), self._share(request, self.keep)
        everything = np.ones(len(request.profile), dtype=bool)
        if len(blocks) < 2 or share == 1:
            return request.plan_of_mask(self.name, everything)
        places = _places(blocks)
        drops = tuple((block.module, share) for block in places)
        kept = KeptTokens(drops, classes_of(request, self.name))
        fewer = request.with_transform(kept)
        return with_tokens(fewer.plan_of_mask(self.name, everything), request, kept)

    def _share(self, request: PlanRequest, end: float) -> float:
        if self.fits is None:
            return end
        before = int(request.memory.of(self.name).facts.get("fits", 1)) - 1
        return cosine_share(before / self.fits, end)


def _places(blocks: Sequence[TokenBlock]) -> list[TokenBlock]:
    """Return the blocks behind which tokens are dropped: of twelve the fourth, the seventh and the tenth."""
    depth = len(blocks)
    return [
        blocks[place] for place in sorted({depth // 4, depth // 2, depth * 3 // 4} - {depth - 1})
    ]
