"""Let an optimiser drive parts of its tensors, with views of its state, so that nothing it remembers is lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fl_elastic.errors import TrainingError
from fl_elastic.methods.windows.windowed import Narrow
from fl_elastic.profiling.optimizers import alike

__all__ = ["driving"]


@contextmanager
def driving(optimizer: torch.optim.Optimizer, narrow: Sequence[Narrow]) -> Iterator[None]:
    """Drive the windows instead of the whole parameters inside the block.

    State tensors as large as the parameter are windows of it as well, others (counts of steps) are the parameter's.
    A step in the block is the one of the whole parameters with the units outside left alone, their state included.
    Windows in two pieces are written back at the end.

    Raises
    ------
    TrainingError
        If the optimiser keeps state of another shape, of which no window is known.
    """
    parts = {each.whole: each.part for each in narrow}
    before = [group["params"] for group in optimizer.param_groups]
    states = [optimizer.state.pop(each.whole, None) for each in narrow]
    for group in optimizer.param_groups:
        group["params"] = [parts.get(parameter, parameter) for parameter in group["params"]]
    for each, state in zip(narrow, states, strict=True):
        if state:
            optimizer.state[each.part] = {
                name: each.window.take(value) if _is_whole(value, each.whole) else value
                for name, value in state.items()
            }
    try:
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, before, strict=True):
            group["params"] = parameters
        learnt = [optimizer.state.pop(each.part, None) for each in narrow]
        for each, state in zip(narrow, states, strict=True):
            if state is not None:
                optimizer.state[each.whole] = state
    with torch.no_grad():
        for each, state, new in zip(narrow, states, learnt, strict=True):
            if not each.window.is_view(each.whole):
                each.window.put(each.whole, each.part)
            if new:
                optimizer.state[each.whole] = _merged(optimizer, each, state or {}, new)


def _is_whole(value: Any, whole: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == whole.shape


def _merged(
    optimizer: torch.optim.Optimizer, each: Narrow, state: dict[str, Any], new: dict[str, Any]
) -> dict[str, Any]:
    """Return the state of the whole parameter with that of its window in it."""
    fresh: dict[str, Any] | None = None
    merged: dict[str, Any] = {}
    for name, value in new.items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            merged[name] = value
            continue
        if value.shape != each.part.shape:
            raise TrainingError(
                f"{type(optimizer).__name__} keeps {name!r} of shape {tuple(value.shape)} for a weight of "
                f"{tuple(each.part.shape)}, of which no window of channels is known: use an optimiser that keeps "
                "numbers for each weight, such as SGD or Adam, or another policy than 'slice_out'"
            )
        whole: Any = state.get(name)
        if not _is_whole(whole, each.whole):
            fresh = _fresh_state(optimizer, each.whole) if fresh is None else fresh
            whole = fresh[name]
        if not (each.window.is_view(whole) and _shares(whole, each, value)):
            each.window.put(whole, value)
        merged[name] = whole
    return merged


def _shares(whole: Tensor, each: Narrow, value: Tensor) -> bool:
    return each.window.take(whole).data_ptr() == value.data_ptr()


def _fresh_state(optimizer: torch.optim.Optimizer, whole: nn.Parameter) -> dict[str, Any]:
    """Return what the optimiser keeps of a weight of zeros that has had no gradient but zeros."""
    weight = nn.Parameter(torch.zeros_like(whole))
    weight.grad = torch.zeros_like(whole)
    other = alike(optimizer, weight)
    other.step()
    return dict(other.state[weight])
