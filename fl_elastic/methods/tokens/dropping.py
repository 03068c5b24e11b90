"""Run a transformer whose blocks hand on only the tokens that its class tokens attend to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fl_elastic.errors import PlanError
from fl_elastic.groups.torch_private import OperationMode, named_arguments

__all__ = [
    "Choose",
    "ClassRows",
    "attention_seen",
    "dropping",
    "handing_on",
    "kept_indices",
    "taken",
]

_SOFTMAX = ("aten::_softmax", "aten::_safe_softmax")
Choose = Callable[[int], int]


class ClassRows(OperationMode):  # type: ignore[no-untyped-call]
    """Sees what class tokens attend to in the one attention that runs inside the block.

    Of a fused attention only these rows of the weights are computed, from the queries and keys that it is given, so
    that it does not matter how the model makes them; of one in single operations they are taken from its softmax.

    Parameters
    ----------
    classes : int
        How many tokens, the first ones, are class tokens.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._classes = classes
        self._rows: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Let every operation run as ever, and look at attention."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.name().partition(".")[0]
        if name.startswith("aten::_scaled_dot_product"):
            self._rows.append(_class_rows(self._classes, named_arguments(func, args) | kwargs))
        elif name in _SOFTMAX and out.dim() == 4 and out.shape[2] == out.shape[3]:
            self._rows.append(out[:, :, : self._classes].detach())
        return out

    def scores(self, tokens: int) -> Tensor:
        """Return how much the class tokens attend to each token, mean over them and the heads; shape (N, T).

        Raises
        ------
        PlanError
            If not exactly one attention over so many tokens ran.
        """
        if len(self._rows) != 1 or self._rows[0].shape[-1] != tokens:
            raise PlanError(
                f"{len(self._rows)} attentions over {tokens} tokens were seen in a block, so that what its class "
                "token attends to is not known: tokens are kept where a block has one, by torch's "
                "scaled_dot_product_attention or a softmax of shape (N, heads, tokens, tokens)"
            )
        return self._rows[0].float().mean(dim=(1, 2))


@torch.no_grad()
def _class_rows(classes: int, given: dict[str, Any]) -> Tensor:
    """Return the rows of the weights of a fused attention, shape (N, heads, classes, T)."""
    masks = [given.get(name) for name in ("attn_mask", "attn_bias")]
    if given.get("is_causal") or any(mask is not None for mask in masks):
        raise PlanError(
            "the attention of a block is masked: tokens are kept by what the class token attends to, which must be "
            "free to attend to all of them"
        )
    query, key = given["query"][:, :, :classes].float(), given["key"].float()
    if key.shape[1] != query.shape[1]:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scale = given.get("scale")
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    weights: Tensor = (query @ key.transpose(-2, -1) * factor).softmax(dim=-1)
    return weights


def kept_indices(scores: Tensor, classes: int, count: int) -> Tensor:
    """Return the places of the tokens that stay, in their order; shape (N, classes + count).

    The class tokens and the ``count`` others of the highest scores; of equal ones the earlier.

    Parameters
    ----------
    scores : Tensor
        Shape (N, T), class tokens first.
    classes, count : int
        Class tokens, and how many others stay.

    Examples
    --------
    >>> kept_indices(torch.tensor([[0.0, 0.2, 0.5, 0.2, 0.1]]), 1, 2).tolist()
    [[0, 1, 2]]
    """
    best = scores[:, classes:].argsort(dim=1, descending=True, stable=True)[:, :count] + classes
    first = torch.arange(classes, device=scores.device).expand(len(scores), -1)
    return torch.cat([first, best.sort(dim=1).values], dim=1)


def taken(tokens: Tensor, indices: Tensor) -> Tensor:
    """Return the tokens at these places of each example; (N, T, D) and (N, K) to (N, K, D)."""
    return tokens.gather(1, indices[..., None].expand(-1, -1, tokens.shape[2]))


@contextmanager
def handing_on(
    model: nn.Module, module: str, change: Callable[[Callable[[], Tensor]], Tensor]
) -> Iterator[None]:
    """Let a module put out what ``change`` makes of its run, inside the block.

    Parameters
    ----------
    model : nn.Module
        That holds it.
    module : str
        Its name.
    change : callable
        Gets a function that runs the module and returns its output.
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
    """Keep torch from running a whole layer of attention as one operation, as it does in inference."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def dropping(model: nn.Module, module: str, classes: int, choose: Choose) -> Iterator[None]:
    """Let a block hand on the tokens alone that its class tokens attend to most, inside the block.

    No gradient goes into the choice.

    Parameters
    ----------
    model : nn.Module
        That holds the block.
    module : str
        The block's name; it puts out tokens of shape (N, T, D).
    classes : int
        How many tokens, the first ones, always stay.
    choose : callable
        Returns how many of so many others stay.
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
