"""Find out whether a transformer may go on with some of its tokens, by running it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fl_elastic.errors import PlanError
from fl_elastic.groups import Batch, LossFn
from fl_elastic.groups.examples import take_examples
from fl_elastic.groups.forward import compute_loss, split_batch
from fl_elastic.groups.token_blocks import TokenBlock
from fl_elastic.groups.untouched import same_chances, untouched
from fl_elastic.ops.kept_tokens import dropping, handing_on

__all__ = ["class_tokens"]

# A class token, and one more for distillation.
_MOST_CLASSES = 2
_FEW = 2
_TOLERANCE = 1e-3


def class_tokens(
    model: nn.Module, loss_fn: LossFn, batch: Batch, blocks: Sequence[TokenBlock], first: TokenBlock
) -> int:
    """Return from how many tokens, the first ones, the model answers; it is left as it was.

    Parameters
    ----------
    model : nn.Module
        A chain of ``blocks``.
    loss_fn : callable
        ``loss_fn(outputs, targets)``.
    batch : batch
        Two of its examples are taken.
    blocks : sequence of TokenBlock
        All of them, see `token_blocks`.
    first : TokenBlock
        The first of them behind which tokens may be left out.

    Raises
    ------
    PlanError
        If it answers from all of them, or what lies above ``first`` sees in which places tokens stand, or does not
        work on fewer of them.
    """
    inputs, targets = take_examples(split_batch(batch), slice(_FEW))
    few, last = (inputs, targets), blocks[-1].module
    with untouched(model), same_chances(model), torch.no_grad():
        model.eval()
        classes = next(
            (n for n in range(1, _MOST_CLASSES + 1) if _reads_only(model, loss_fn, few, last, n)),
            None,
        )
        if classes is None:
            raise PlanError(
                "the model answers from all tokens behind its last block, as by their mean: tokens are left out "
                "where it answers from a class token, the first one; use policy 'elastic'"
            )
        order = _mixed(first.tokens, classes)
        with _put_out(model, last, lambda tokens: tokens) as plain:
            compute_loss(model, loss_fn, few)
        with (
            _put_out(model, last, lambda tokens: tokens) as mixed,
            _put_out(model, first.module, lambda tokens: tokens[:, order]),
        ):
            compute_loss(model, loss_fn, few)
        if not _alike(plain[0][:, order], mixed[0]):
            raise PlanError(
                f"what lies above {first.module!r} sees in which places the tokens stand, as with biases of their "
                "distance: tokens are left out where places are told once, before the first block; use policy "
                "'elastic'"
            )
        try:
            with dropping(model, first.module, classes, lambda count: max(1, count // 2)):
                compute_loss(model, loss_fn, few)
        except PlanError:
            raise
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise PlanError(
                f"what lies above {first.module!r} does not work on fewer tokens: {reason}; use policy 'elastic'"
            ) from error
    return classes


def _reads_only(model: nn.Module, loss_fn: LossFn, batch: Batch, last: str, classes: int) -> bool:
    """Whether the loss is the same whatever stands in the other tokens behind the last block."""

    def lost(tokens: Tensor) -> Tensor:
        left = torch.full_like(tokens, torch.nan)
        left[:, :classes] = tokens[:, :classes]
        return left

    with _put_out(model, last, lost):
        return bool(compute_loss(model, loss_fn, batch).isfinite())


@contextmanager
def _put_out(
    model: nn.Module, module: str, change: Callable[[Tensor], Tensor]
) -> Iterator[list[Tensor]]:
    """Change what a module puts out inside the block, and note it as it was."""
    noted: list[Tensor] = []

    def changed(run: Callable[[], Tensor]) -> Tensor:
        tokens = run()
        noted.append(tokens)
        return change(tokens)

    with handing_on(model, module, changed):
        yield noted


def _mixed(tokens: int, classes: int) -> list[int]:
    """Return places in random order, the same each time; class tokens stay in theirs."""
    others = torch.randperm(tokens - classes, generator=torch.Generator().manual_seed(0)) + classes
    return [*range(classes), *others.tolist()]


def _alike(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return bool((one - other).abs().max() <= _TOLERANCE * one.abs().max().clamp(min=1e-6))
