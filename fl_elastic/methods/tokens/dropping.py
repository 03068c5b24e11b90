"""Run a transformer whose blocks pass on only the tokens that its class tokens attend to most."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fl_elastic.errors import PlanError
from fl_elastic.groups.torch_private import OperationMode, named_arguments

_SOFTMAX = ("aten::_softmax", "aten::_safe_softmax")
Choose = Callable[[int], int]


class ClassRows(OperationMode):  # type: ignore[no-untyped-call]
    """Records the attention weights of class tokens in the single attention that runs inside the context.

    For a fused attention only these rows of the weights are computed again, from its queries and keys. For an
    attention made of single operations the rows are taken from its softmax.

    Parameters
    ----------
    classes : int
        Number of class tokens, which are the first tokens.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._classes = classes
        self._rows: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run every operation unchanged, and record attention."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.name().partition(".")[0]
        if name.startswith("aten::_scaled_dot_product"):
            self._rows.append(_class_rows(self._classes, named_arguments(func, args) | kwargs))
        elif name in _SOFTMAX and out.dim() == 4 and out.shape[2] == out.shape[3]:
            self._rows.append(out[:, :, : self._classes].detach())
        return out

    def scores(self, tokens: int) -> Tensor:
        """Return the class tokens' attention to each token, averaged over class tokens and heads; shape (N, T).

        Raises
        ------
        PlanError
            Unless exactly one attention over this many tokens ran.
        """
        if len(self._rows) != 1 or self._rows[0].shape[-1] != tokens:
            raise PlanError(
                f"a block ran {len(self._rows)} attentions over {tokens} tokens, so that it is not known what its "
                "class token attends to: tokens can only be dropped after a block that runs exactly one, by "
                "torch's scaled_dot_product_attention or a softmax of shape (N, heads, tokens, tokens)"
            )
        return self._rows[0].float().mean(dim=(1, 2))


@torch.no_grad()
def _class_rows(classes: int, given: dict[str, Any]) -> Tensor:
    """Return the rows of the weights of a fused attention, shape (N, heads, classes, T)."""
    masks = [given.get(name) for name in ("attn_mask", "attn_bias")]
    if given.get("is_causal") or any(mask is not None for mask in masks):
        raise PlanError(
            "the attention of a block is masked: tokens are chosen by the class token's attention, which must not "
            "be masked"
        )
    query, key = given["query"][:, :, :classes].float(), given["key"].float()
    if key.shape[1] != query.shape[1]:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scale = given.get("scale")
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    weights: Tensor = (query @ key.transpose(-2, -1) * factor).softmax(dim=-1)
    return weights


def kept_indices(scores: Tensor, classes: int, count: int) -> Tensor:
    """Return the positions of the tokens that are kept, in order; shape (N, classes + count).

    These are the class tokens and the ``count`` other tokens with the highest scores; of tokens with equal scores
    the earlier ones.

    Parameters
    ----------
    scores : Tensor
        Shape (N, T), class tokens first.
    classes, count : int
        Number of class tokens, and of other tokens to keep.

    Examples
    --------
    >>> kept_indices(torch.tensor([[0.0, 0.2, 0.5, 0.2, 0.1]]), 1, 2).tolist()
    [[0, 1, 2]]
    """
    best = scores[:, classes:].argsort(dim=1, descending=True, stable=True)[:, :count] + classes
    first = torch.arange(classes, device=scores.device).expand(len(scores), -1)
    return torch.cat([first, best.sort(dim=1).values], dim=1)


def taken(tokens: Tensor, indices: Tensor) -> Tensor:
    """Return the tokens at these positions of each example; (N, T, D) and (N, K) to (N, K, D)."""
    return tokens.gather(1, indices[..., None].expand(-1, -1, tokens.shape[2]))


@contextmanager
def handing_on(
    model: nn.Module, module: str, change: Callable[[Callable[[], Tensor]], Tensor]
) -> Iterator[None]:
    """Replace a module's output by the result of ``change``, inside the context.

    Parameters
    ----------
    model : nn.Module
        The model that contains the module.
    module : str
        Name of the module.
    change : callable
        Called with a function that runs the module and returns its output; returns the new output.
    """
    block = model.get_submodule(module)
    before, plain = block.__dict__.get("forward"), block.forward

    def forward(*arguments: Any, **keywords: Any) -> Tensor:
        return change(lambda: plain(*arguments, **keywords))

    block.__dict__["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            block.__dict__.pop("forward", None)
        else:
            block.__dict__["forward"] = before


@contextmanager
def attention_seen() -> Iterator[None]:
    """Keep torch from running a whole attention layer as a single operation, as it does in inference."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def dropping(model: nn.Module, module: str, classes: int, choose: Choose) -> Iterator[None]:
    """Let a block pass on only the tokens that its class tokens attend to most, inside the context.

    No gradient flows through the choice of tokens.

    Parameters
    ----------
    model : nn.Module
        The model that contains the block.
    module : str
        Name of the block, whose output is a sequence of tokens of shape (N, T, D).
    classes : int
        Number of class tokens, which come first and are always kept.
    choose : callable
        Called with the number of tokens besides the class tokens; returns how many of these are kept.
    """

    def change(run: Callable[[], Tensor]) -> Tensor:
        with attention_seen(), ClassRows(classes) as rows:
            tokens = run()
        count = choose(tokens.shape[1] - classes)
        if count >= tokens.shape[1] - classes:
            return tokens
        return taken(tokens, kept_indices(rows.scores(tokens.shape[1]), classes, count))

    with handing_on(model, module, change):
        yield
