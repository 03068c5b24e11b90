"""Run forward and backward passes that leave the model and the random state unchanged."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import getclosurevars
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_elastic.groups.held_state import (
    Attributes,
    content_of,
    followers,
    let_go,
    put_content_back,
    write,
)
from fl_elastic.groups.model_state import refuse_unshaped
from fl_elastic.groups.torch_private import (
    has_gradient_hooks,
    own_buffers,
    own_parts,
    spared_group_norms,
)


@dataclass(frozen=True, eq=False)
class RngState:
    """State of the random number generators of torch, Python and numpy.

    For torch these are the CPU's generator and, once CUDA is in use, those of all GPUs.
    """

    of_torch: list[Tensor]
    of_python: Any
    of_numpy: Any

    @classmethod
    def now(cls) -> RngState:
        """Return the present state."""
        states = [generator.get_state() for generator in _generators()]
        return cls(states, random.getstate(), np.random.get_state())

    def put_back(self) -> None:
        """Set the generators to this state."""
        # Not strict: CUDA may have been initialised since.
        for generator, state in zip(_generators(), self.of_torch, strict=False):
            generator.set_state(state)
        random.setstate(self.of_python)
        np.random.set_state(self.of_numpy)

    def moved(self) -> bool:
        """Return whether any random number was drawn since this state."""
        now = RngState.now()
        drawn = self.of_python != now.of_python or not all(
            map(torch.equal, self.of_torch, now.of_torch)
        )
        # numpy's state: name, keys, position, and a cached half of a normal pair.
        pairs = zip(self.of_numpy[1:], now.of_numpy[1:], strict=True)
        return drawn or not all(np.array_equal(a, b) for a, b in pairs)


def _generators() -> list[torch.Generator]:
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.default_generator, *(torch.cuda.default_generators if in_use else ())]


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore the random number generators on leaving the block, so that it does not affect later random numbers.

    Examples
    --------
    >>> before = RngState.now()
    >>> with preserved_rng():
    ...     _ = torch.rand(3)
    >>> before.moved()
    False
    """
    before = RngState.now()
    try:
        yield
    finally:
        before.put_back()


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Allow train and eval modes to be changed inside the block; they are restored on leaving it.

    Examples
    --------
    >>> model = nn.Sequential(nn.Dropout()).train()
    >>> with modes_kept(model):
    ...     _ = model.eval()
    >>> model[0].training
    True
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def repeated_rng(model: nn.Module) -> Iterator[None]:
    """Make every forward pass inside the block draw the same random numbers.

    Passes that are compared then drop the same units and layers.
    """
    before = RngState.now()
    handle = model.register_forward_pre_hook(lambda *_: before.put_back())
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def same_start(model: nn.Module) -> Iterator[None]:
    """Make every forward pass inside the block start with the same module attributes and random state.

    Passes that measure the costs of a step then take the same path. Inside, attributes of modules must not be set.
    """
    held = Attributes.of(model)

    def begin(*_: Any) -> None:
        held.put_back()
        for buffer in model.buffers():
            let_go(buffer)

    handle = model.register_forward_pre_hook(begin)
    try:
        with repeated_rng(model):
            yield
    finally:
        handle.remove()


def _holds_tensors(value: object) -> bool:
    """Return whether a value is a tensor or a list of tensors, as hooks collect them over backward passes."""
    return isinstance(value, Tensor) or (
        isinstance(value, list) and bool(value) and all(isinstance(each, Tensor) for each in value)
    )


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return one.layout is not torch.strided or one.data_ptr() == other.data_ptr()


def _owner(loss_fn: object) -> object:
    """Return the object that holds a loss's state: the instance of a method, or the function inside a partial."""
    while isinstance(loss_fn, partial):
        loss_fn = loss_fn.func
    return loss_fn.__self__ if isinstance(loss_fn, MethodType) else loss_fn


def _modules_in(owner: object) -> list[nn.Module]:
    """Return the module that a loss is, or those that a function refers to."""
    if isinstance(owner, nn.Module):
        return [owner]
    if not isinstance(owner, FunctionType):
        return []
    try:
        names = getclosurevars(owner)
    except ValueError:
        # A name that has no value yet.
        return []
    known = {**names.globals, **names.nonlocals}
    return [each for each in known.values() if isinstance(each, nn.Module)]


@contextmanager
def untouched(model: nn.Module, loss_fn: object = None) -> Iterator[None]:
    """Restore buffers, attributes, gradients, ``requires_grad``, modes and RNG on leaving the block.

    RNG means that of torch, Python and numpy. Weights are not copied, except those that a pass may change:
    `followers`, and those with hooks on their complete gradient. The block must not write to any other weight.
    Inside, gradients start as ``None``, and so do tensors that hooks have stored on parameters, such as per-example
    gradients.

    Parameters
    ----------
    model : nn.Module
        The model that the block runs.
    loss_fn : callable, optional
        A loss that the block computes. Its state is restored as well, and so are modules that a function refers to:
        they may follow the outputs, like the centre in self-distillation.

    Raises
    ------
    ModelError
        If a lazy module has no shapes yet.

    Examples
    --------
    >>> model = nn.BatchNorm1d(2)
    >>> with untouched(model):
    ...     _ = model(torch.randn(4, 2))
    >>> model.num_batches_tracked.item()
    0
    """
    refuse_unshaped(model)
    owner = _owner(loss_fn)
    whole = nn.ModuleList([model, *_modules_in(owner)])
    held = {} if isinstance(owner, nn.Module) else getattr(owner, "__dict__", {})
    held_before = content_of(held)
    parameters = list(whole.parameters())
    # Hooks may leave results on the parameters, such as per-example gradients.
    left = [
        (vars(each), {n: (v, content_of(v)) for n, v in vars(each).items()}) for each in parameters
    ]
    gradients = [parameter.grad for parameter in parameters]
    trainable = [parameter.requires_grad for parameter in parameters]
    hooked = [each for each in parameters if has_gradient_hooks(each)]
    moving = (*whole.buffers(), *{id(each): each for each in (*followers(model), *hooked)}.values())
    buffers = [(buffer, buffer.data, buffer.detach().clone()) for buffer in moving]
    attributes = Attributes.of(whole)
    # A model may also assign new tensors to its buffers, and make parts in its first pass.
    assigned = [
        (own, dict(own))
        for module in whole.modules()
        for own in (own_buffers(module), *own_parts(module))
    ]
    modes = [(module, module.training) for module in whole.modules()]
    for parameter, (own, _) in zip(parameters, left, strict=True):
        parameter.grad = None
        own.update(dict.fromkeys((name for name, each in own.items() if _holds_tensors(each))))
    try:
        with preserved_rng(), spared_group_norms(model):
            yield
    finally:
        for own, names in assigned:
            if own.keys() != names.keys() or any(own[name] is not names[name] for name in names):
                own.clear()
                own.update(names)
        attributes.put_back()
        put_content_back(held, held_before)
        with torch.no_grad():
            for buffer, memory, before in buffers:
                if buffer.shape != before.shape:
                    # For example an observer that has seen its first batch.
                    buffer.data = torch.empty_like(before)
                elif not _same_memory(buffer, memory):
                    # ``data`` was replaced: views of the old memory must show the restored values.
                    buffer.data = memory
                write(buffer, before)
        for noted, earlier in left:
            noted.clear()
            for name, (value, content) in earlier.items():
                noted[name] = value
                put_content_back(value, content)
        for parameter, gradient, flag in zip(parameters, gradients, trainable, strict=True):
            parameter.requires_grad_(flag)
            parameter.grad = gradient
        for module, mode in modes:
            module.training = mode
