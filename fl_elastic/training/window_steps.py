"""Take steps on windows of channels: draw them, prove them once, train in them, remember what they held."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_elastic.errors import PlanError
from fl_elastic.groups import Batch
from fl_elastic.groups.forward import call_model, split_batch
from fl_elastic.groups.graph import Width
from fl_elastic.groups.torch_private import BatchNorm
from fl_elastic.groups.untouched import same_chances, untouched
from fl_elastic.ops.windowed import Narrow, spans_of, windowed
from fl_elastic.planning.windows import Windows
from fl_elastic.training.narrow_optimizer import driving

__all__ = ["WindowLog", "WindowSteps", "prove_widths", "settle_statistics", "settling_passes"]

# Batches at most of which running statistics are taken anew after steps on windows.
_SETTLING = 8

Kept = Mapping[Width, tuple[int, int]]
_PROVEN: WeakKeyDictionary[nn.Module, set[Width]] = WeakKeyDictionary()


@dataclass(eq=False)
class WindowLog:
    """What the windows of a fit held, by whatever plan.

    Attributes
    ----------
    held : dict of str to list of array
        For each tensor that was trained in part, by axis which indices some window held.
    batches : deque of batch
        The last ones that steps in windows took.
    """

    held: dict[str, list[NDArray[np.bool_]]] = field(default_factory=dict)
    batches: deque[Batch] = field(default_factory=lambda: deque(maxlen=_SETTLING))


class WindowSteps:
    """Opens a window for each step of a plan.

    Parameters
    ----------
    model : nn.Module
        Trained in place.
    windows : Windows
        Of the plan.
    log : WindowLog
        Of the fit; written.
    """

    def __init__(self, model: nn.Module, windows: Windows, log: WindowLog) -> None:
        self._model, self._windows, self._log = model, windows, log
        self._names = {id(each): name for name, each in model.named_parameters()}
        self._step = 0

    @contextmanager
    def step(self, optimizer: torch.optim.Optimizer, batch: Batch) -> Iterator[list[Narrow]]:
        """Let model and optimiser consist of this step's windows inside the block.

        Raises
        ------
        PlanError
            If something outside of the layers of a width sees its channels, which the first step finds out.
        """
        prove_widths(self._model, self._windows.widths, batch)
        starts = self._windows.starts(self._step)
        kept = {w: (starts[w.name], self._windows.length(w)) for w in self._windows.widths}
        self._step += 1
        self._log.batches.append(batch)
        with windowed(self._model, kept) as narrow, driving(optimizer, narrow):
            yield narrow
        self._remember(narrow)

    def _remember(self, narrow: list[Narrow]) -> None:
        for each in narrow:
            shape = tuple(each.whole.shape)
            masks = self._log.held.setdefault(
                self._names[id(each.whole)], [np.zeros(n, dtype=bool) for n in shape]
            )
            windowed_axes = {span.axis: span for span in each.window.spans}
            for axis, mask in enumerate(masks):
                span = windowed_axes.get(axis)
                for first, count in (
                    [(0, shape[axis])] if span is None else span.pieces(shape[axis])
                ):
                    mask[first : first + count] = True


def settling_passes(model: nn.Module, requested_steps: int) -> int:
    """Return how many forward passes a fit of so many steps spends on running statistics: none without any."""
    if not _training_norms(model):
        return 0
    return min(_SETTLING, 1 + requested_steps // _SETTLING)


@torch.no_grad()
def settle_statistics(model: nn.Module, batches: Sequence[Batch]) -> None:
    """Replace the running statistics of batch norms that train by their means over some batches."""
    norms = _training_norms(model)
    before = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
    try:
        for count, batch in enumerate(batches, start=1):
            for norm in norms:
                norm.momentum = 1 / count
            call_model(model, split_batch(batch)[0])
    finally:
        for norm, momentum in zip(norms, before, strict=True):
            norm.momentum = momentum


def _training_norms(model: nn.Module) -> list[BatchNorm]:
    return [
        each
        for each in model.modules()
        if isinstance(each, BatchNorm) and each.training and each.track_running_stats
    ]


def prove_widths(model: nn.Module, widths: tuple[Width, ...], batch: Batch) -> None:
    """Compare windows with the whole model whose other channels are zero, once for each model and width.

    The graph does not show constants, nor what is done with tensors that are cut off from it.

    Raises
    ------
    PlanError
        If a window gives something else, or cannot be run.
    """
    proven = _PROVEN.setdefault(model, set())
    left = [width for width in widths if width not in proven]
    if not left:
        return
    inputs = split_batch(batch)[0]
    with untouched(model), same_chances(model), torch.no_grad():
        model.eval()
        if not _alike(model, left, inputs):
            wrong = [width.name for width in left if not _alike(model, [width], inputs)]
            raise PlanError(
                f"windows of {', '.join(wrong) or left[0].name} change more than leaving their other channels out "
                "does: the model also uses these channels in a way that its graph does not show, such as with a "
                "constant of their number; use policy 'elastic'"
            )
    proven.update(left)


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
        # Numbers of few bits are rounded in each layer.
        rounding = torch.finfo(one.dtype).eps if one.is_floating_point() else 0.0
        atol = max(1e-4, 4 * rounding) * float(one.abs().max()) + 1e-6
        return torch.allclose(one, other, rtol=max(1e-3, 4 * rounding), atol=atol)
    if isinstance(one, Mapping):
        return all(_same(value, other[name]) for name, value in one.items())
    if isinstance(one, (tuple, list)):
        return all(_same(mine, theirs) for mine, theirs in zip(one, other, strict=True))
    return True


@contextmanager
def _masked(model: nn.Module, kept: Kept) -> Iterator[None]:
    """Set channels outside of the windows to zero wherever a layer takes them in."""
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
