"""All code that uses torch's private names, in one place, to be checked with each new release of torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as NormWithStatistics
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode as OperationMode

from fl_elastic.errors import ModelError

__all__ = [
    "COMPILED",
    "BatchNorm",
    "CheckpointedPart",
    "NormWithStatistics",
    "OperationMode",
    "checkpoint_hook",
    "checkpointed_parts",
    "compiled_parts",
    "has_gradient_hooks",
    "has_hooks",
    "hooked",
    "is_observed",
    "named_arguments",
    "next_number",
    "no_view",
    "number_of",
    "output_shape",
    "own_buffers",
    "own_parameters",
    "own_parts",
    "recorded_allocations",
    "spared_group_norms",
    "steps_alone",
    "uncompiled",
    "version_of",
    "without_new_hooks",
    "writes_to",
]

_CHECKPOINT_HOOK = "_checkpoint_hook"


def number_of(node: Any) -> int:
    """Return how many nodes of the backward graph were made before this node on its thread."""
    return int(node._sequence_nr())


def next_number() -> int:
    """Return the number that the next node will get."""
    return int(torch._C._autograd._get_sequence_nr())


def output_shape(node: Any) -> tuple[int, ...]:
    """Return the shape of the output of a node's operation; empty if torch does not record it."""
    outputs = getattr(node, "_input_metadata", ())
    return tuple(int(length) for length in outputs[0].shape) if outputs else ()


def refuse_nested(tensor: Tensor) -> None:
    """Raise ModelError for a nested tensor, whose row sizes and memory cannot be read."""
    if tensor.is_nested:
        raise ModelError(
            "the model computes with nested tensors, on which the costs of its layers cannot be measured: pad the "
            "examples to one length, with torch.nested.to_padded_tensor or in the loader"
        )


def mark_of(storage: torch.UntypedStorage) -> StorageWeakRef:
    """Return a key for a storage that differs from those of later storages at its address and keeps no memory."""
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def writes_to(tensor: Tensor) -> int:
    """Return how often a tensor was written; 0 for tensors made in inference mode, whose writes are not counted."""
    return 0 if tensor.is_inference() else tensor._version


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Return whether a parameter has hooks that run once its gradient is complete, such as an optimiser's step."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def no_view(tensor: Tensor) -> Tensor:
    """Return a tensor with the same numbers that is not a view, so that in-place operations may write it."""
    plain: Tensor = torch.ops.aten._unsafe_view(tensor, tensor.shape)
    return plain


def named_arguments(operation: Any, arguments: Sequence[Any]) -> dict[str, Any]:
    """Return the positional arguments of an operation of an `OperationMode` by name."""
    return dict(
        zip((argument.name for argument in operation._schema.arguments), arguments, strict=False)
    )


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the dictionary in which a module holds its own buffers, without those of its submodules."""
    return module._buffers


def own_parts(module: nn.Module) -> list[dict[str, Any]]:
    """Return the dictionaries in which a module holds its own parameters and submodules."""
    held = (module._parameters, module._modules)
    return [each for each in held if isinstance(each, dict)]


def own_parameters(module: nn.Module) -> Mapping[str, nn.Parameter | None]:
    """Return the parameters that a module holds itself, without computed ones."""
    return module._parameters


def is_observed(module: nn.Module, *, inputs_only: bool = False) -> bool:
    """Return whether a hook sees the inputs of this module or, unless ``inputs_only``, its outputs.

    Torch's own hooks do not count: they compute the module's weight.

    >>> layer = nn.utils.spectral_norm(nn.Linear(2, 2))
    >>> is_observed(layer), bool(layer.register_forward_hook(print)), is_observed(layer)
    (False, True, True)
    """
    after = () if inputs_only else module._forward_hooks.values()
    hooks = (*after, *module._forward_pre_hooks.values())
    return any(not type(hook).__module__.startswith("torch.nn.") for hook in hooks)


def hooked(tensor: Tensor) -> tuple[int, ...]:
    """Return a key that identifies the hooks on a tensor's gradient."""
    return tuple(tensor._backward_hooks or ())


@contextmanager
def without_new_hooks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Remove the hooks on gradients that are registered inside the block.

    >>> weight = torch.zeros(1, requires_grad=True)
    >>> with without_new_hooks([weight]):
    ...     _ = weight.register_hook(torch.neg)
    >>> hooked(weight)
    ()
    """
    before = [(tensor, dict(tensor._backward_hooks or {})) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, hooks in before:
            if tensor._backward_hooks is not None and tensor._backward_hooks.keys() != hooks.keys():
                tensor._backward_hooks.clear()
                tensor._backward_hooks.update(hooks)


def checkpoint_hook() -> object:
    """Return the function that torch calls for each checkpointed part; None if this release has none."""
    return getattr(checkpoint, _CHECKPOINT_HOOK, None)


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimiser has the hook attributes that ``Optimizer.__init__`` sets."""
    return "_optimizer_step_pre_hooks" in vars(optimizer)


def steps_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimiser's step is that of its class, without hooks or a replaced method."""
    own = vars(optimizer)
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    # A learning rate schedule replaces ``step`` by a method that counts the call and then runs the original.
    counted = getattr(own.get("step"), "_wrapped_by_lr_sched", "step" not in own)
    return bool(counted) and not any(own.get(name) for name in hooks)


# torch.__version__ compares as a release, although it is a string.
_GROUP_NORM_CRASHES = torch.__version__ < "2.14"


@contextmanager
def spared_group_norms(model: nn.Module) -> Iterator[None]:
    """Keep torch before 2.14 from crashing the process in the backward pass of a GroupNorm, inside the block.

    On a CPU, torch reads invalid memory if the input of a trained GroupNorm needs no gradient and is laid out
    channels last, as directly above a frozen part. Such an input is made contiguous.
    """
    norms = model.modules() if _GROUP_NORM_CRASHES else ()
    hooks = [
        norm.register_forward_pre_hook(_plainly_laid_out)
        for norm in norms
        if isinstance(norm, nn.GroupNorm)
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
"""Prefix that ``torch.compile`` adds to the names of a model's tensors."""


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile`` was called on, whose names have no prefix; or the model itself.

    Raises
    ------
    ModelError
        If the model is not a torch module that can be trained in parts.
    """
    if not isinstance(model, nn.Module):
        name = model.__name__ if isinstance(model, type) else type(model).__name__
        said = f"{name} is not a torch module but a class: give {name}(...)"
        other = f"of type {name} is not a torch module"
        raise ModelError(f"model {said if isinstance(model, type) else other}")
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(
            "the model is a TorchScript module, whose parts cannot be told apart: give the nn.Module that it was "
            "made from"
        )
    original = model._modules.get(_ORIGINAL)
    return model if original is None else original


def compiled_parts(model: nn.Module) -> list[str]:
    """Return the names of modules whose calls run compiled code; the model itself has an empty name."""
    return [
        name.removesuffix(_ORIGINAL).rstrip(".")
        for name, module in model.named_modules()
        if module._compiled_call_impl is not None or name.endswith(_ORIGINAL)
    ]


@dataclass(frozen=True)
class CheckpointedPart:
    """A part of a forward pass that ``torch.utils.checkpoint`` runs again in the backward pass.

    Attributes
    ----------
    first, end : int
        Numbers of its nodes, as from `number_of`: the first, and one past the last.
    inputs : tuple of Tensor
        Tensors that are kept until the part runs again.
    """

    first: int
    end: int
    inputs: tuple[Tensor, ...]


@contextmanager
def checkpointed_parts(*, left_out: bool) -> Iterator[list[CheckpointedPart]]:
    """Record the parts of forward passes inside the block that are checkpointed, except reentrant ones.

    Parameters
    ----------
    left_out : bool
        Whether to run each of these parts without checkpointing, so that it stores its tensors, and to record its
        inputs; otherwise only the beginning and end of each part are recorded.
    """
    noted: list[CheckpointedPart] = []
    original = getattr(checkpoint, _CHECKPOINT_HOOK, None)
    if original is None:
        # A torch release without the hook: checkpointed parts are not recorded, and nothing else changes.
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

    setattr(checkpoint, _CHECKPOINT_HOOK, noting)
    try:
        yield noted
    finally:
        setattr(checkpoint, _CHECKPOINT_HOOK, original)


def _inputs_of(frame: Any) -> tuple[Tensor, ...]:
    if hasattr(frame, "get_inputs"):
        given = frame.get_inputs()
    else:
        # Up to torch 2.12 a special node keeps the inputs.
        node = frame.input_saver.grad_fn
        given = node.get_args(node.saved_tensors)
    return tuple(each for each in given if isinstance(each, Tensor))


def version_of(tensor: Tensor) -> int | None:
    """Return a number that grows with each in-place change of a tensor; None if torch does not count them."""
    return None if tensor.is_inference() else tensor._version


@contextmanager
def recorded_allocations() -> Iterator[list[tuple[str, int, int]]]:
    """Record the allocations and releases of CPU memory inside the block, and the operations in between.

    The list is filled when the block ends, in order of time. An entry is either the beginning of an operation or
    node, with its name and its number as from `number_of` (-1 if it has none), or a change of memory, with an empty
    name and the number of bytes, negative for a release. The list stays empty in a torch release without such
    records, and while another profiler runs.
    """
    events: list[tuple[str, int, int]] = []
    if not _recording_begins():
        yield events
        return
    profiler: Any = torch.autograd
    try:
        yield events
    finally:
        for thread in profiler._disable_profiler_legacy():
            events += [
                (event.name(), event.sequence_nr(), event.cpu_memory_usage())
                for event in thread
                if event.kind() in ("push", "memory_alloc")
            ]


def _recording_begins() -> bool:
    """Start torch's profiler for memory; return False if it cannot be started."""
    profiler: Any = torch.autograd
    try:
        if profiler._profiler_enabled():
            return False
        state, more = profiler.ProfilerState.CPU, torch._C._profiler._ExperimentalConfig()
        # Of shapes, memory, stacks, costs of operations and modules, record only memory.
        config = profiler.ProfilerConfig(state, False, True, False, False, False, more)
        profiler._enable_profiler_legacy(config)
    except (AttributeError, TypeError):
        # These names and parameters are private to torch and may change in another release.
        return False
    return True
