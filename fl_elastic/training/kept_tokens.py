"""Run a model on the tokens that a plan keeps, in training and in evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from torch import nn

from fl_elastic.ops.kept_tokens import dropping
from fl_elastic.planning import Plan
from fl_elastic.planning.tokens import kept_count

__all__ = ["on_kept_tokens"]


@contextmanager
def on_kept_tokens(model: nn.Module, plan: Plan) -> Iterator[None]:
    """Let ``model`` go on with the tokens that ``plan`` keeps inside the block; with all, if it leaves none out.

    What a model was trained on is what it answers from: evaluate it inside as well, or it sees more tokens than in
    training, which takes longer.

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
    kept = plan.tokens
    with ExitStack() as stack:
        drops = {} if kept is None else {m: partial(kept_count, share=s) for m, s in kept.drops}
        if kept is not None and kept.attention < 1:
            # One policy alone masks attention, where it is told to.
            from fl_elastic.ops.attention_masks import thinning

            attend = partial(kept_count, share=kept.attention)
            stack.enter_context(thinning(model, kept.blocks, drops, kept.classes, attend))
        elif kept is not None:
            for module, choose in drops.items():
                stack.enter_context(dropping(model, module, kept.classes, choose))
        yield
