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
    with ExitStack() as stack:
        if plan.tokens is not None:
            for module, share in plan.tokens.drops:
                choose = partial(kept_count, share=share)
                stack.enter_context(dropping(model, module, plan.tokens.classes, choose))
        yield
