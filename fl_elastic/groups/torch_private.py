"""What torch offers under private names alone, in one place for whoever tries a new release of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as NormWithStatistics
from torch.utils._python_dispatch import TorchDispatchMode as OperationMode

from fl_elastic.errors import ModelError

__all__ = [
    "COMPILED",
    "BatchNorm",
    "CheckpointedPart",
    "NormWithStatistics",
    "OperationMode",
    "called_hooks",
    "checkpoint_hook",
    "checkpointed_parts",
    "compiled_parts",
    "has_hooks",
    "hooked",
    "named_arguments",
    "next_number",
    "no_view",
    "number_of",
    "output_shape",
    "own_buffers",
    "own_parameters",
    "spared_group_norms",
    "steps_alone",
    "uncompiled",
    "writes_to",
]

_CHECKPOINT_HOOK = "_checkpoint_hook"


def number_of(node: Any) -> int:
    """Return how many nodes of the backward graph were made before this one on its thread."""
    return int(node._sequence_nr())


def next_number() -> int:
    """Return the number that the next node will have."""
    return int(torch._C._autograd._get_sequence_nr())


def output_shape(node: Any) -> tuple[int, ...]:
    """Return the shape of what a node's operation put out, empty where torch does not say."""
    outputs = getattr(node, "_input_metadata", ())
    return tuple(int(length) for length in outputs[0].shape) if outputs else ()


def mark_of(storage: torch.UntypedStorage) -> StorageWeakRef:
    """Return what tells a storage apart, also from later ones at its address, without keeping its memory."""
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def writes_to(tensor: Tensor) -> int:
    """Return how often a tensor was written; torch does not count it for those of inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def no_view(tensor: Tensor) -> Tensor:
    """Return the same numbers as no view, which in-place operations may write."""
    plain: Tensor = torch.ops.aten._unsafe_view(tensor, tensor.shape)
    return plain


def named_arguments(operation: Any, arguments: Sequence[Any]) -> dict[str, Any]:
    """Return what an operation of an `OperationMode` is given by place, by name."""
    return dict(zip((each.name for each in operation._schema.arguments), arguments, strict=False))


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the dictionary in which a module holds its buffers, those of modules inside of it left out."""
    return module._buffers


def own_parameters(module: nn.Module) -> Mapping[str, nn.Parameter | None]:
    """Return the parameters that a module holds itself; one that is computed anew is none of them."""
    return module._parameters


def called_hooks(module: nn.Module) -> bool:
    """Whether a call of this very module calls hooks, forward or backward."""
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(hooks)


def hooked(tensor: Tensor) -> tuple[int, ...]:
    """Return what tells the hooks on a tensor's gradient from others."""
    return tuple(tensor._backward_hooks or ())


def checkpoint_hook() -> object:
    """Return what torch calls for each part that is checkpointed, None if it has no such function."""
    return getattr(torch.utils.checkpoint, _CHECKPOINT_HOOK, None)


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimiser has a place for hooks on its step, as ``Optimizer.__init__`` makes it."""
    return "_optimizer_step_pre_hooks" in vars(optimizer)


def steps_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Whether nothing else than its class is at work in an optimiser's step: neither hooks nor another step."""
    own = vars(optimizer)
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    # A schedule puts a step of its own before the class's, which counts and calls it.
    counted = getattr(own.get("step"), "_wrapped_by_lr_sched", "step" not in own)
    return bool(counted) and not any(own.get(name) for name in hooks)


# Compared as a release, in spite of its type.
_GROUP_NORM_CRASHES = torch.__version__ < "2.14"


@contextmanager
def spared_group_norms(model: nn.Module) -> Iterator[None]:
    """Keep torch before 2.14 from ending the process inside the block, on the way back through a GroupNorm.

    On a CPU it reads what is not there, where a GroupNorm trains whose input needs no gradient and is laid out
    channels last, as right above what is frozen: such an input is laid out plainly.
    """
    norms = model.modules() if _GROUP_NORM_CRASHES else ()
    hooks = [
        each.register_forward_pre_hook(_plainly_laid_out)
        for each in norms
        if isinstance(each, nn.GroupNorm)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _plainly_laid_out(norm: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    x = inputs[0]
    if x.requires_grad or x.device.type != "cpu" or not torch.is_grad_enabled():
        return None
    return (x.contiguous(), *inputs[1:])


_ORIGINAL = "_orig_mod"
COMPILED = f"{_ORIGINAL}."
"""What ``torch.compile`` puts in front of the names of a model's tensors."""


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile`` was called on, whose names have no prefix; any other as it is.

    Raises
    ------
    ModelError
        If it is no module of torch that can be trained in parts.
    """
    if not isinstance(model, nn.Module):
        name = model.__name__ if isinstance(model, type) else type(model).__name__
        said = f"{name} is no torch module but a class: give {name}(...)"
        other = f"of type {name} is no torch module"
        raise ModelError(f"model {said if isinstance(model, type) else other}")
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(
            "the model is a TorchScript module, whose parts cannot be told apart: give the nn.Module that it was "
            "made from"
        )
    original = model._modules.get(_ORIGINAL)
    return model if original is None else original


def compiled_parts(model: nn.Module) -> list[str]:
    """Return the names of modules whose calls run compiled code, the model itself as an empty name."""
    return [
        name.removesuffix(_ORIGINAL).rstrip(".")
        for name, module in model.named_modules()
        if module._compiled_call_impl is not None or name.endswith(_ORIGINAL)
    ]


@dataclass(frozen=True)
class CheckpointedPart:
    """A part of a forward pass that ``torch.utils.checkpoint`` runs a second time on the way back.

    Attributes
    ----------
    first, end : int
        Numbers of its nodes, as `number_of` gives them: from the first up to and without the end.
    inputs : tuple of Tensor
        What is kept meanwhile.
    """

    first: int
    end: int
    inputs: tuple[Tensor, ...]


@contextmanager
def checkpointed_parts(*, left_out: bool) -> Iterator[list[CheckpointedPart]]:
    """Note which parts of forward passes inside the block are checkpointed, without reentrant ones.

    Parameters
    ----------
    left_out : bool
        Whether these parts keep what they need instead, as if nobody had asked to run them again.
    """
    noted: list[CheckpointedPart] = []
    module = torch.utils.checkpoint
    original = getattr(module, _CHECKPOINT_HOOK, None)
    if original is None:
        # Another release of torch: what its checkpoints keep is not told apart, and all else goes on.
        yield noted
        return

    @contextmanager
    def noting(frame: Any) -> Iterator[None]:
        first = next_number()
        if left_out:
            inputs = _inputs_of(frame)
            yield
        else:
            inputs = ()
            with original(frame):
                yield
        noted.append(CheckpointedPart(first, next_number(), inputs))

    setattr(module, _CHECKPOINT_HOOK, noting)
    try:
        yield noted
    finally:
        setattr(module, _CHECKPOINT_HOOK, original)


def _inputs_of(frame: Any) -> tuple[Tensor, ...]:
    if hasattr(frame, "get_inputs"):
        given = frame.get_inputs()
    else:
        # Up to torch 2.12 a node of their own keeps them.
        node = frame.input_saver.grad_fn
        given = node.get_args(node.saved_tensors)
    return tuple(each for each in given if isinstance(each, Tensor))
