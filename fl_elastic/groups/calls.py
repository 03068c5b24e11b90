"""Record the module calls of one forward pass: their nesting, and the autograd nodes at their ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fl_elastic.groups.torch_private import refuse_nested


@dataclass
class Call:
    """One call of one module.

    Attributes
    ----------
    module : str
        Name of the module; empty for the model itself.
    parents : tuple of int
        Indices of the calls around this one, outermost first.
    input_node, output_node : node or None
        Autograd node of the only input tensor, and of the output tensor.
    output_shape : tuple of int or None
        Shape of the output tensor; None if the output is something else.
    is_random : bool
        Whether the module drops values at random in its present mode.
    """

    module: str
    parents: tuple[int, ...]
    input_node: Any = None
    output_node: Any = None
    output_shape: tuple[int, ...] | None = None
    is_random: bool = False


@contextmanager
def recorded_calls(model: nn.Module) -> Iterator[list[Call]]:
    """Record every module call of ``model`` inside the block, in the order in which the calls began."""
    calls: list[Call] = []
    stack: list[int] = []
    handles = []

    def entering(name: str) -> Any:
        def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            if not name:
                # A new call of the whole model after a failed one: earlier records belong to no graph.
                calls.clear()
                stack.clear()
            node = _only_node((*arguments, *keywords.values()))
            calls.append(Call(name, tuple(stack), node, is_random=_is_random(module)))
            stack.append(len(calls) - 1)

        return hook

    def leaving(_: nn.Module, __: Any, output: Any) -> None:
        call = calls[stack.pop()]
        if isinstance(output, Tensor):
            refuse_nested(output)
            call.output_node, call.output_shape = output.grad_fn, tuple(output.shape)

    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(entering(name), with_kwargs=True))
        handles.append(module.register_forward_hook(leaving))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _is_random(module: nn.Module) -> bool:
    """Return whether this is an active dropout of any kind; there is no common base class to test for."""
    name = type(module).__name__
    drops = "Dropout" in name or name in ("StochasticDepth", "DropPath")
    return drops and module.training and bool(getattr(module, "p", 1.0))


def _only_node(values: tuple[Any, ...]) -> Any:
    """Return the autograd node of a call's argument if that is a single tensor, else None."""
    if len(values) == 1 and isinstance(values[0], Tensor):
        return values[0].grad_fn
    return None
