"""Run a transformer whose tokens attend to a part of the others: all other weights of its attention are zero."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fl_elastic.errors import PlanError
from fl_elastic.methods.tokens.dropping import (
    Choose,
    attention_seen,
    handing_on,
    kept_indices,
    taken,
)

__all__ = ["largest_entries", "thinning"]

# As published: it keeps a row without a weight from dividing by zero.
_LEAST = 1e-6


def largest_entries(weights: Tensor, classes: int, count: int) -> Tensor:
    """Return which weights stay: in each row those of class tokens and the ``count`` largest others; (N, T, T).

    Rows of class tokens stay whole. Of equal weights the earlier stay.

    Parameters
    ----------
    weights : Tensor
        What each token gives each other one, class tokens first; shape (N, T, T).
    classes, count : int
        Class tokens, and how many others stay in a row.

    Examples
    --------
    >>> weights = torch.tensor([[[0.2, 0.4, 0.4], [0.1, 0.2, 0.7], [0.3, 0.6, 0.1]]])
    >>> largest_entries(weights, 1, 1).int().tolist()
    [[[1, 1, 1], [1, 0, 1], [1, 1, 0]]]
    """
    kept = torch.zeros_like(weights, dtype=torch.bool)
    order = weights[:, :, classes:].argsort(dim=2, descending=True, stable=True)
    kept.scatter_(2, order[:, :, :count] + classes, True)
    kept[:, :classes] = True
    kept[:, :, :classes] = True
    return kept


class _Attention:
    """The one attention of a block: with some of its weights at zero, and looked at.

    Attributes
    ----------
    mask : Tensor or None
        Weights that stay, shape (N, T, T), the same for all heads; None for all.
    weights : list of Tensor
        Means over the heads of what ran, shape (N, T, T).
    """

    def __init__(self, mask: Tensor | None, *, looks: bool) -> None:
        self.mask, self._looks = mask, looks
        self.weights: list[Tensor] = []
        self.ran = 0

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attend as `torch.nn.functional.scaled_dot_product_attention` does, by the weights that stay."""
        if is_causal or attn_mask is not None:
            raise PlanError(
                "the attention of a block is masked by its model: tokens are kept, and weights left out, where all "
                "may attend to all"
            )
        self.ran += 1
        if enable_gqa:
            shared = query.shape[1] // key.shape[1]
            key, value = (each.repeat_interleave(shared, dim=1) for each in (key, value))
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        scores = (query @ key.transpose(-2, -1) * factor).float()
        # A maximum moves nothing, and has no gradient to give.
        weights = (scores - scores.amax(dim=-1, keepdim=True).detach()).exp()
        if self.mask is not None:
            weights = weights * self.mask[:, None]
        weights = weights / (weights.sum(dim=-1, keepdim=True) + _LEAST)
        if self._looks:
            self.weights.append(weights.detach().mean(dim=1))
        return functional.dropout(weights.to(value.dtype), dropout_p) @ value


@contextmanager
def _attending(attention: _Attention) -> Iterator[None]:
    """Let attention of this thread be another inside the block."""
    plain, mine = functional.scaled_dot_product_attention, threading.get_ident()

    def chosen(*arguments: Any, **keywords: Any) -> Tensor:
        run = attention if threading.get_ident() == mine else plain
        return run(*arguments, **keywords)

    functional.scaled_dot_product_attention = chosen
    try:
        with attention_seen():
            yield
    finally:
        functional.scaled_dot_product_attention = plain


@contextmanager
def thinning(
    model: nn.Module,
    blocks: Sequence[str],
    drops: Mapping[str, Choose],
    classes: int,
    attend: Choose,
) -> Iterator[None]:
    """Leave tokens out behind some blocks, and let those that stay attend to a part of each other from there on.

    The attention level of Tri-Level E-ViT (Kong et al., AAAI 2023): of the tokens that stay, each goes on to attend
    to the class tokens and to those others that it attended to most, by the mean over the heads, until the next
    such block chooses anew. Weights that are left out are computed and multiplied by zero, as published, so that no
    time is saved. No gradient goes into a choice.

    Parameters
    ----------
    model : nn.Module
        A chain of blocks.
    blocks : sequence of str
        Names of the first block of ``drops`` and of all above it, in the order of the forward pass.
    drops : mapping of str to callable
        Blocks behind which tokens are left out; each returns how many of so many others stay.
    classes : int
        How many tokens, the first ones, always stay.
    attend : callable
        Returns to how many of so many others a token attends.

    Raises
    ------
    PlanError
        If a block does not have exactly one attention, by `torch.nn.functional.scaled_dot_product_attention`, or
        its model masks it.
    """
    masks: dict[str, Tensor | None] = {}

    def change(run: Any, block: str, source: str) -> Tensor:
        choose = drops.get(block)
        attention = _Attention(masks.get(source), looks=choose is not None)
        with _attending(attention):
            tokens: Tensor = run()
        if attention.ran != 1:
            raise PlanError(
                f"block {block!r} called torch's scaled_dot_product_attention {attention.ran} times: weights of "
                "attention are left out where a block attends once, by that function"
            )
        if choose is None:
            return tokens
        weights = attention.weights[0]
        count = min(choose(tokens.shape[1] - classes), tokens.shape[1] - classes)
        places = kept_indices(weights[:, :classes].mean(dim=1), classes, count)
        among = taken(taken(weights, places).transpose(1, 2), places).transpose(1, 2)
        masks[block] = largest_entries(among, classes, attend(count))
        return taken(tokens, places)

    with ExitStack() as stack:
        source = ""
        for block in blocks:
            changed = partial(change, block=block, source=source)
            stack.enter_context(handing_on(model, block, changed))
            source = block if block in drops else source
        yield
