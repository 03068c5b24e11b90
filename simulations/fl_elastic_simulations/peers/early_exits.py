"""A model with early exits, at the end of each of its blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fl_elastic.errors import ModelError
from fl_elastic.groups import Batch, LossFn
from fl_elastic.groups.forward import call_model
from fl_elastic.groups.graph import BackwardGraph, Cut, GroupKind
from fl_elastic.groups.trace import trace_step
from fl_elastic.groups.trainable import note_flags
from fl_elastic.groups.untouched import untouched
from fl_elastic.profiling.profile import model_device

_NAME = "early_exits"


class ExitHead(nn.Module):
    """Class scores from a block's features: the mean over positions, then a linear layer.

    Parameters
    ----------
    features, classes : int
        Features per example, and number of class scores.
    axis : int
        Axis of the features; all other axes except the first are positions.
    """

    def __init__(self, features: int, classes: int, axis: int) -> None:
        super().__init__()
        self.axis = axis
        self.linear = nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of shape (batch, classes)."""
        places = [axis for axis in range(1, x.dim()) if axis != self.axis % x.dim()]
        scores: Tensor = self.linear(x.mean(dim=places) if places else x)
        return scores


class EarlyExits(nn.Module):
    """The unchanged model, with its tensors under their own names, and an exit after each block.

    Parameters
    ----------
    model : nn.Module
        The model; its parts become parts of this module, and it computes the outputs unless an exit is taken.
    ends : sequence of Cut
        Ends of all blocks except the last, from the input on.
    heads : sequence of ExitHead
        Exit heads, one per end.
    """

    def __init__(self, model: nn.Module, ends: Sequence[Cut], heads: Sequence[ExitHead]) -> None:
        super().__init__()
        # Shared, not copied: an assignment to a tensor's name here must also reach the model itself.
        self.__dict__["_parameters"] = model._parameters
        self.__dict__["_buffers"] = model._buffers
        self.__dict__["_non_persistent_buffers_set"] = model._non_persistent_buffers_set
        self.__dict__["_model"] = model
        self._modules.update(model._modules)
        self.add_module(_NAME, nn.ModuleList(heads))
        self.ends = tuple(ends)
        self._exit: int | None = None
        self._hold_heads()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy; notes on parameters are not copied, so they are made again."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._hold_heads()

    def _hold_heads(self) -> None:
        """Freeze the heads until a plan trains them: the whole model does not use them, but they travel with it."""
        heads = self._modules[_NAME]
        assert heads is not None
        note_flags(heads.requires_grad_(True).parameters())
        heads.requires_grad_(False)

    def train(self, mode: bool = True) -> EarlyExits:
        """Set the training mode, including that of the model itself."""
        super().train(mode)
        self.__dict__["_model"].training = mode
        return self

    def exit_parameters(self, block: int) -> tuple[str, ...]:
        """Return the names of the tensors of the exit after a block, counted from the input."""
        head = self.get_submodule(f"{_NAME}.{block}")
        return tuple(f"{_NAME}.{block}.{name}" for name, _ in head.named_parameters())

    @contextmanager
    def left_after(self, block: int) -> Iterator[None]:
        """Within this context, return a block's exit scores and run nothing after it; the last block has none."""
        self._exit = block if block < len(self.ends) else None
        try:
            yield
        finally:
            self._exit = None

    def forward(self, inputs: Any) -> Any:
        """Return the model's outputs, or the scores of the exit that is taken."""
        model: nn.Module = self.__dict__["_model"]
        if self._exit is None:
            return call_model(model, inputs)
        end = self.ends[self._exit]
        last = self.get_submodule(end.module)
        handle = (
            last.register_forward_pre_hook(_leave_before)
            if end.at_input
            else last.register_forward_hook(_leave_behind)
        )
        try:
            call_model(model, inputs)
        except _Reached as reached:
            return self.get_submodule(f"{_NAME}.{self._exit}")(reached.tensor)
        finally:
            handle.remove()
        raise ModelError(f"the model did not reach the end of a block at {end.module!r}")


class _Reached(Exception):
    """Carries the tensor at the end of a block out of the forward pass."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor = tensor


def _leave_before(module: nn.Module, inputs: Any) -> None:
    raise _Reached(inputs[0])


def _leave_behind(module: nn.Module, inputs: Any, outputs: Any) -> None:
    raise _Reached(outputs)


def with_exits(model: nn.Module, loss_fn: LossFn, batch: Batch) -> EarlyExits:
    """Return the model with an untrained exit after every block except the last.

    The exits are the same for each call with such a model. Torch's random state is unchanged.

    Parameters
    ----------
    model : nn.Module
        Returns class scores of shape (batch, classes).
    loss_fn : callable
        ``loss_fn(outputs, targets)``.
    batch : tuple
        ``(inputs, targets)``.

    Raises
    ------
    ModelError
        If the outputs are not class scores, or no place for an exit is found.

    Examples
    --------
    >>> plain = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    >>> batch = torch.randn(5, 4), torch.zeros(5, dtype=torch.long)
    >>> list(with_exits(plain, nn.functional.cross_entropy, batch).state_dict())[4:]
    ['early_exits.0.linear.weight', 'early_exits.0.linear.bias']
    """
    if hasattr(model, _NAME):
        raise ModelError(f"the model already has an attribute {_NAME!r}: rename it")
    with untouched(model):
        graph = trace_step(model, loss_fn, batch).graph
        with torch.no_grad():
            scores = call_model(model.eval(), batch[0])
    if not isinstance(scores, Tensor) or scores.dim() != 2:
        raise ModelError(
            "early exits need a model that returns class scores of shape (batch, classes)"
        )
    ends = block_ends(graph)
    if not ends:
        raise ModelError(
            "no layer of the model ends in one tensor that all the rest depends on, so it has no exits"
        )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        heads = [_head_at(graph, end, scores.shape[1]) for end in ends]
    return EarlyExits(model, ends, [head.to(model_device(model)) for head in heads])


def block_ends(graph: BackwardGraph) -> tuple[Cut, ...]:
    """Return the ends of blocks, from the input on, except that of the last block.

    A block lies between two places at which the rest of the model depends on one tensor only: a layer of a chain, a
    unit of a residual network. A norm belongs to the block before it.
    """
    ends = []
    below = sorted(graph.cuts, key=lambda cut: -cut.groups_above)
    next_above = [*(cut.groups_above for cut in below[1:]), 0]
    for cut, above in zip(below, next_above, strict=False):
        behind = graph.groups[above : cut.groups_above]
        if any(group.kind is not GroupKind.NORM for group in behind):
            ends.append(cut)
    return tuple(ends)


def _head_at(graph: BackwardGraph, end: Cut, classes: int) -> ExitHead:
    shape = graph.nodes[end.node].shape
    axis = 1
    if len(shape) == 3:
        # Channels come first after a convolution, last in a sequence of tokens.
        owners = [
            group for group in graph.groups[end.groups_above :] if _makes_features(group.kind)
        ]
        tokens = (
            not owners or owners[0].kind is GroupKind.LINEAR or owners[0].shapes[0][0] != shape[1]
        )
        axis = 2 if tokens else 1
    return ExitHead(shape[axis], classes, axis)


def _makes_features(kind: GroupKind) -> bool:
    return kind in (GroupKind.CONV, GroupKind.LINEAR, GroupKind.EMBEDDING)
