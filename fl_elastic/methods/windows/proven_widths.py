"""Test whether a model works on windows of its inner widths, which its graph alone does not show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fl_elastic.errors import DivergedError, PlanError
from fl_elastic.groups import Batch
from fl_elastic.groups.batch import as_pair
from fl_elastic.groups.forward import all_finite, call_model
from fl_elastic.groups.graph import Width
from fl_elastic.groups.untouched import repeated_rng, untouched
from fl_elastic.methods.windows.windowed import spans_of, windowed

Kept = Mapping[Width, tuple[int, int]]
_PROVEN: WeakKeyDictionary[nn.Module, set[Width]] = WeakKeyDictionary()


def proven_widths(model: nn.Module, widths: Sequence[Width], batch: Batch) -> tuple[Width, ...]:
    """Return the widths for which windows give the same outputs as setting all other channels to zero.

    The graph alone does not show this: constants, operations on detached tensors, and numbers of heads that are
    fixed in a model's code are missing in it. A width that works is not tested again on the same model.

    Parameters
    ----------
    model : nn.Module
        It is left unchanged.
    widths : sequence of Width
        Widths of its graph.
    batch : batch
        The model is run on its inputs.
    """
    proven = _PROVEN.setdefault(model, set())
    left = [width for width in widths if width not in proven]
    if left:
        inputs = as_pair(batch)[0]
        with untouched(model), repeated_rng(model), torch.no_grad():
            model.eval()
            if not _alike(model, left, inputs):
                left = [width for width in left if _alike(model, [width], inputs)]
                # Widths that work separately may not work together.
                left = left if _alike(model, left, inputs) else []
            proven.update(left)
    return tuple(width for width in widths if width in proven)


def prove_widths(model: nn.Module, widths: Sequence[Width], batch: Batch) -> None:
    """Test widths as `proven_widths` does.

    Raises
    ------
    DivergedError
        If the model's outputs are not finite.
    PlanError
        If windows of a width give another result, or cannot be run.
    """
    found = set(proven_widths(model, widths, batch))
    wrong = [width.name for width in widths if width not in found]
    if wrong:
        raise PlanError(
            f"windows of {', '.join(wrong)} give other outputs than setting the other channels to zero: the model "
            "also uses these channels in a way that its graph does not show, such as with a constant of their "
            "number; use policy 'elastic'"
        )


def _alike(model: nn.Module, widths: list[Width], inputs: Any) -> bool:
    kept = {width: (width.size // 4, max(width.size // 2, 1)) for width in widths}
    with _masked(model, kept):
        whole = call_model(model, inputs)
    try:
        with windowed(model, kept, scaled=False):
            part = call_model(model, inputs)
    except (RuntimeError, ValueError, IndexError, TypeError):
        return False
    return _same(whole, part)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        if not isinstance(other, Tensor) or one.shape != other.shape:
            return False
        if not all_finite(one):
            raise DivergedError(
                "the model's outputs for a batch are not finite: check the batch for NaN and the learning rate"
            )
        # Low-precision numbers are rounded in each layer.
        rounding = torch.finfo(one.dtype).eps if one.is_floating_point() else 0.0
        atol = max(1e-4, 4 * rounding) * float(one.abs().max()) + 1e-6
        return torch.allclose(one, other, rtol=max(1e-3, 4 * rounding), atol=atol)
    if isinstance(one, Mapping):
        return all(_same(value, other[name]) for name, value in one.items())
    if isinstance(one, (tuple, list)):
        return all(_same(mine, theirs) for mine, theirs in zip(one, other, strict=True))
    # Outputs may be an object with tensors as attributes.
    return _same(vars(one), vars(other)) if hasattr(one, "__dict__") else bool(one == other)


@contextmanager
def _masked(model: nn.Module, kept: Kept) -> Iterator[None]:
    """Set channels outside of the windows to zero at the input of every layer that reads them."""
    spans = spans_of(model, kept)
    with ExitStack() as stack:
        for width in kept:
            for reader in width.readers:
                module, span = model.get_submodule(reader.module), spans[reader.module][1]
                weight: Any = module.weight
                mask = torch.zeros(weight.shape[1], device=weight.device, dtype=weight.dtype)
                for first, count in span.pieces(len(mask)):
                    mask[first : first + count] = 1
                if not isinstance(module, nn.Linear):
                    mask = mask.reshape(-1, *[1] * (weight.dim() - 2))
                hook = module.register_forward_pre_hook(lambda _, given, mask=mask: given[0] * mask)
                stack.callback(hook.remove)
        yield
