"""Settings of token dropping: after which blocks of a transformer tokens are dropped, and the share kept."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from torch import nn

from fl_elastic.errors import PlanError
from fl_elastic.planning.plan import Plan
from fl_elastic.planning.step_transform import StepCase, StepTransform


@dataclass(frozen=True)
class KeptTokens(StepTransform):
    """The blocks after which tokens are dropped, and the shares that are kept.

    The kept tokens are chosen for each example separately: those that its class tokens attend to most in the block,
    averaged over heads. After a frozen block an example keeps the same tokens in every step.

    Attributes
    ----------
    drops : tuple of (str, float)
        Blocks, in the order of the forward pass, each with the share of its tokens that is passed on, in (0, 1].
    classes : int
        Number of class tokens, which come first. They are always kept, and the share does not include them.

    Raises
    ------
    PlanError
        If a share is invalid.
    """

    drops: tuple[tuple[str, float], ...]
    classes: int = 1
    runs_part: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for module, share in self.drops:
            if not 0 < share <= 1:
                raise PlanError(
                    f"share {share} of tokens after {module!r} must be above 0 and at most 1"
                )
        if self.classes < 1:
            raise PlanError(
                f"{self.classes} class tokens: give at least 1, by whose attention tokens are dropped"
            )

    def counts(self, tokens: int) -> tuple[int, ...]:
        """Return the number of tokens, including class tokens, after each of the blocks.

        Examples
        --------
        >>> KeptTokens((("blocks.3", 0.9), ("blocks.6", 0.9), ("blocks.9", 0.9))).counts(197)
        (178, 161, 145)
        """
        counts = []
        for _, share in self.drops:
            tokens = self.classes + kept_count(tokens - self.classes, share)
            counts.append(tokens)
        return tuple(counts)

    def case(self, case: StepCase) -> StepCase:
        """Return the case with fewer tokens after some of the profile's blocks."""
        # Imported here: only needed to price a plan.
        from fl_elastic.methods.tokens.blocks import fewer_tokens_profile, token_blocks

        places = {block.module: block for block in token_blocks(case.profile.graph)}
        drops = [places[module] for module, _ in self.drops]
        counts = self.counts(drops[0].tokens)
        pairs = list(zip(drops, counts, strict=True))
        return replace(case, profile=fewer_tokens_profile(case.profile, pairs))

    @contextmanager
    def applied(self, model: nn.Module, plan: Plan) -> Iterator[None]:
        """Let the model drop tokens inside the context.

        Frozen parts run in eval mode, because the choice of tokens must not depend on random numbers.
        """
        # Imported here: only needed to apply a plan.
        from fl_elastic.training.apply_plan import held_in_eval

        trained = set(plan.trained_parameters)
        with held_in_eval(model, _frozen_modules(model, trained)), self.dropping(model):
            yield

    @contextmanager
    def dropping(self, model: nn.Module) -> Iterator[None]:
        """Let the model drop tokens inside the context, without changing the mode of any module."""
        from fl_elastic.methods.tokens.dropping import dropping

        with ExitStack() as stack:
            for module, share in self.drops:
                choose = partial(kept_count, share=share)
                stack.enter_context(dropping(model, module, self.classes, choose))
            yield

    def feature_key(self, below: Collection[str] | None = None) -> tuple[str, ...]:
        """Return ``module:share`` of each drop, which distinguishes features computed with other tokens.

        With ``below``, only drops at or inside these modules are included.
        """
        return tuple(
            f"{module}:{share}"
            for module, share in self.drops
            if below is None
            or any(module == name or module.startswith(f"{name}.") for name in below)
        )


@contextmanager
def on_kept_tokens(model: nn.Module, plan: Plan) -> Iterator[None]:
    """Let ``model`` drop tokens as ``plan`` does, inside the context; a plan that drops none changes nothing.

    Evaluate a model inside this context, too: outside of it, the model runs on more tokens than in training.

    Examples
    --------
    >>> import torch
    >>> from fl_elastic.budget import Budget
    >>> from fl_elastic.training import evaluate, plan_for
    >>> model = nn.Linear(2, 2)
    >>> data = [(torch.zeros(4, 2), torch.zeros(4, dtype=torch.long))]
    >>> plan = plan_for(model, nn.functional.cross_entropy, data, budget=Budget(), policy="full")
    >>> with on_kept_tokens(model, plan):
    ...     evaluate(model, nn.functional.cross_entropy, data).num_examples
    4
    """
    kept = plan.transform(KeptTokens)
    if kept is None:
        yield
        return
    with kept.dropping(model):
        yield


def _frozen_modules(model: nn.Module, trained: set[str]) -> list[nn.Module]:
    """Return the outermost modules that have parameters, but none that is trained."""
    frozen: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for prefix, module in model.named_modules():
        own = [f"{prefix}.{name}" if prefix else name for name, _ in module.named_parameters()]
        if own and module not in inside and trained.isdisjoint(own):
            frozen.append(module)
            inside.update(module.modules())
    return frozen


def kept_count(tokens: int, share: float) -> int:
    """Return how many of the tokens are kept: the share, rounded up.

    Examples
    --------
    >>> [kept_count(tokens, 0.9) for tokens in (196, 177, 160)]
    [177, 160, 144]
    """
    # The tolerance keeps a product that is whole up to rounding from being rounded up.
    return min(tokens, max(1, math.ceil(tokens * share - 1e-9)))
