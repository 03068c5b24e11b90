"""A model's state: its live tensors under the names by which they are sent and saved."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fl_elastic.errors import ModelError
from fl_elastic.groups.torch_private import uncompiled

# Modules of these packages hold one model and nothing else.
_WRAPPERS = ("opacus.", "torch.nn.parallel.")


@dataclass(frozen=True, eq=False)
class ModelState:
    """The tensors of a model, by their names in ``state_dict()``.

    The server's model has the same names. ``named_parameters()`` and ``named_buffers()`` give other names if hooks
    on ``state_dict()`` rename tensors, as wrappers for activation checkpointing do. Entries that are not tensors,
    such as extra state, stay with the model.

    Attributes
    ----------
    model : nn.Module
        The model; for a compiled one the module that was compiled.
    prefix : str
        Prefix that a wrapper around the whole model, such as that of Opacus, adds to the names; it is not sent.
    tensors : dict of str to tensor
        By name, in the order of the state. Parameters and buffers are the model's own tensors; others are those
        that ``state_dict()`` returned.

    Examples
    --------
    >>> state = ModelState.of(nn.Linear(2, 1))
    >>> list(state.tensors), state.tensors["weight"] is state.model.weight
    (['weight', 'bias'], True)
    """

    model: nn.Module
    tensors: dict[str, Tensor]
    prefix: str = ""

    @classmethod
    def of(cls, model: nn.Module) -> ModelState:
        """Return the present state of a model."""
        model = uncompiled(model)
        try:
            found: Mapping[str, Any] = model.state_dict(keep_vars=True)
        except TypeError:
            # A class whose own ``state_dict`` takes no options.
            found = model.state_dict()
        own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        state = {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}
        if any(id(tensor) not in own for tensor in state.values()):
            views = {_memory(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
            state = {
                name: tensor if id(tensor) in own else views.get(_memory(tensor), tensor)
                for name, tensor in state.items()
            }
        prefix = wrapper_prefix(model)
        return cls(model, {n.removeprefix(prefix): tensor for n, tensor in state.items()}, prefix)

    @cached_property
    def names(self) -> dict[int, tuple[str, ...]]:
        """Names of each tensor by its id; a tied parameter has several."""
        found: dict[int, list[str]] = {}
        for name, tensor in self.tensors.items():
            found.setdefault(id(tensor), []).append(name)
        return {key: tuple(names) for key, names in found.items()}

    @cached_property
    def by_module_name(self) -> dict[str, tuple[str, ...]]:
        """Names in the state, by each name in ``named_parameters()`` or ``named_buffers()``."""
        model = self.model
        named = (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
        return {name: self.names.get(id(tensor), ()) for name, tensor in named}

    def parameter_of(self, name: str) -> str:
        """Return the first name in ``named_parameters()`` of a tensor of the state.

        Raises
        ------
        ModelError
            If the state has no parameter of this name.
        """
        wanted = self.tensors.get(name)
        for known, tensor in self.model.named_parameters():
            if tensor is wanted:
                return known
        raise ModelError(f"the state of the model has no parameter {name!r}")

    def load(self, values: Mapping[str, Tensor], names: Collection[str] | None = None) -> None:
        """Write values into the live tensors, under all names or only under ``names``.

        Entries that the model computes for its state, such as extra state, are passed to its ``load_state_dict``.

        Raises
        ------
        ModelError
            If a tensor was made in inference mode and cannot be written.
        """
        wanted = list(values) if names is None else [name for name in values if name in names]
        own = {id(tensor) for tensor in (*self.model.parameters(), *self.model.buffers())}
        computed = [name for name in wanted if id(self.tensors[name]) not in own]
        for name in wanted:
            if self.tensors[name].is_inference() and not torch.is_inference_mode_enabled():
                raise ModelError(
                    f"tensor {name!r} was made in inference mode and cannot be written: build the model outside of "
                    "torch.inference_mode()"
                )
        if computed:
            now = self.model.state_dict()
            given = {self.prefix + name: values[name].to(self.tensors[name]) for name in computed}
            self.model.load_state_dict({**now, **given})
        with torch.no_grad():
            for name in wanted:
                if id(self.tensors[name]) in own:
                    self.tensors[name].copy_(values[name])


def refuse_unshaped(model: nn.Module) -> None:
    """Raise ModelError if a lazy module has not run yet, so that its tensors have no shapes."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ModelError(
                f"tensor {name!r} has no shape yet: run the model on a batch before it is trained or sent"
            )


def wrapper_prefix(model: nn.Module) -> str:
    """Return the prefix that a wrapper around a whole model adds to the names of its state; empty without one.

    Examples
    --------
    >>> wrapper_prefix(nn.DataParallel(nn.Linear(2, 2))), wrapper_prefix(nn.Linear(2, 2))
    ('module.', '')
    """
    names = [name for name, _ in model.named_children()]
    ours = type(model).__module__.startswith(_WRAPPERS)
    return f"{names[0]}." if ours and names in (["module"], ["_module"]) else ""


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for tensors that are identical views of the same memory."""
    if (
        is_lazy(tensor)
        or tensor.is_meta
        or tensor.layout is not torch.strided
        or not tensor.numel()
    ):
        return (id(tensor),)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
