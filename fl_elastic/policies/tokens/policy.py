"""What policies have in common that go on with some of a transformer's tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from fl_elastic.errors import PlanError
from fl_elastic.groups.token_blocks import TokenBlock, token_blocks
from fl_elastic.importance.base import Probe
from fl_elastic.planning.plan import Plan
from fl_elastic.planning.policy import PlanRequest, Policy
from fl_elastic.planning.policy_memory import PolicyMemory
from fl_elastic.planning.tokens import KeptTokens
from fl_elastic.policies.tokens.proof import class_tokens
from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.fewer_tokens import fewer_tokens_profile

__all__ = ["TokenPolicy", "classes_of", "priced", "with_tokens"]


class TokenPolicy(Policy):
    """A policy for chains of transformer blocks whose answer comes from class tokens."""

    name: ClassVar[str]

    @abstractmethod
    def first_drop(self, blocks: Sequence[TokenBlock]) -> TokenBlock:
        """Return the first block behind which the policy may ever leave tokens out."""

    def refuse_misfit(self, profile: CostProfile) -> None:
        """Raise PlanError for a model that is no chain of at least two blocks."""
        found = len(token_blocks(profile.graph))
        if found < 2:
            raise PlanError(
                f"policy {self.name!r} leaves tokens of a transformer out, and {found} of its blocks were found: "
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
        blocks = token_blocks(profile.graph)
        classes = class_tokens(
            probe.model, probe.loss_fn, probe.batches[0], blocks, self.first_drop(blocks)
        )
        facts = memory.of(self.name).facts
        return PolicyMemory(self.name, {**facts, "classes": classes})


def classes_of(request: PlanRequest, policy: str) -> int:
    """Return from how many tokens the model answers, as `TokenPolicy.observe` found out."""
    return int(request.memory.of(policy).facts.get("classes", 1))


def priced(request: PlanRequest, blocks: Sequence[TokenBlock], kept: KeptTokens) -> PlanRequest:
    """Return the request for steps that go on with the kept tokens behind some of the blocks."""
    places = {block.module: block for block in blocks}
    drops = [places[module] for module, _ in kept.drops]
    counts = kept.counts(drops[0].tokens)
    return replace(
        request.allowing(request.allowed_step_seconds),
        profile=fewer_tokens_profile(request.profile, list(zip(drops, counts, strict=True))),
    )


def with_tokens(plan: Plan, request: PlanRequest, kept: KeptTokens) -> Plan:
    """Return a plan that was made at the price of fewer tokens, with full and cheapest steps on all of them."""
    return replace(
        plan,
        full_step_seconds=request.profile.full_step_seconds,
        floor_step_seconds=request.profile.floor_step_seconds,
        tokens=kept,
    )
