"""State that a model changes itself: recurrent states, and parameters that follow others without a gradient."""

from __future__ import annotations

import pickle
import random
from collections import Counter, deque
from collections.abc import Mapping, MutableMapping, MutableSequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_elastic.groups.trainable import trainable

# Parameters of one shape without a gradient all count as followers if they take at most this many bytes together.
_SMALL = 1 << 20
# Depth to which nested containers, and objects in them, are examined.
_DEPTH = 4
_NOTHING = (bool, int, float, str, bytes, nn.Parameter, nn.Module)
_OF_TORCH = frozenset(vars(nn.Module())) | {"forward", "train"}


@dataclass(frozen=True, eq=False)
class Attributes:
    """Copies of the plain attributes of modules, for example the state of a recurrent model.

    Values that `content_of` can copy are copied; any other object is remembered by its identity. Parameters,
    buffers, modules and hooks are not included, nor is a ``forward`` or ``train`` method set on an instance.

    Examples
    --------
    >>> layer = nn.Linear(2, 2)
    >>> layer.state = [torch.zeros(2)]
    >>> attributes = Attributes.of(layer)
    >>> layer.state[0] += 1
    >>> layer.calls = 1
    >>> attributes.changed()
    ['calls', 'state']
    >>> attributes.put_back()
    >>> layer.state, hasattr(layer, "calls")
    ([tensor([0., 0.])], False)
    """

    held: tuple[tuple[nn.Module, dict[str, tuple[Any, Any]]], ...]

    @classmethod
    def of(cls, model: nn.Module) -> Attributes:
        """Return the present attributes of all modules of a model."""
        return cls(
            tuple(
                (module, {name: (value, content_of(value)) for name, value in _own(module)})
                for module in model.modules()
            )
        )

    def put_back(self) -> None:
        """Restore all attributes: the same objects, with the same content."""
        for module, before in self.held:
            for name, _ in _own(module):
                if name not in before:
                    del module.__dict__[name]
            for name, (value, copied) in before.items():
                module.__dict__[name] = value
                put_content_back(value, copied)

    def changed(self) -> list[str]:
        """Return the sorted names of attributes that now hold another object, or an object with other content."""
        found: set[str] = set()
        for module, before in self.held:
            now = dict(_own(module))
            found |= now.keys() ^ before.keys()
            found |= {
                name
                for name, (value, copied) in before.items()
                if name in now and not (now[name] is value and _same(value, copied))
            }
        return sorted(found)


def followers(model: nn.Module) -> list[nn.Parameter]:
    """Return parameters that may change without a gradient, and so belong to the learned state of a model.

    An exponential moving average requires no gradient and has the shape of the parameter that it follows. So
    parameters without a gradient count as followers if no more of them than of trained parameters have the same
    shape; this excludes most of a large frozen base. Small ones always count. The weight of an embedding with
    ``max_norm`` also counts, because a call scales its rows down.

    Examples
    --------
    >>> model = nn.ModuleDict({"online": nn.Linear(2, 2), "target": nn.Linear(2, 2)})
    >>> _ = model["target"].requires_grad_(False)
    >>> [tuple(each.shape) for each in followers(model)]
    [(2, 2), (2,)]
    """
    parameters = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    moving = Counter(parameter.shape for parameter in parameters if trainable(parameter))
    still: dict[torch.Size, list[nn.Parameter]] = {}
    for parameter in parameters:
        if not trainable(parameter):
            still.setdefault(parameter.shape, []).append(parameter)
    found = [
        each
        for shape, some in still.items()
        # If there are more of them than trained parameters, it is not known which of them follow one.
        if len(some) <= moving[shape] or len(some) * some[0].nbytes <= _SMALL
        for each in some
    ]
    scaled: list[nn.Parameter] = [
        module.weight  # type: ignore[misc]
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
    ]
    return list({id(each): each for each in (*found, *scaled)}.values())


def _own(module: nn.Module) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(module).items() if name not in _OF_TORCH]


def content_of(value: Any, depth: int = _DEPTH) -> Any:
    """Return a copy of a value's content; None for an object without content that could change.

    Tensors, arrays, random generators, plain containers, and objects with such attributes have content. Parameters
    and modules do not: a list that holds one does not own it.
    """
    if value is None or isinstance(value, _NOTHING):
        return None
    if type(value) is tuple and all(type(each) is int for each in value):
        # For speed: kernel sizes, strides and so on, of which a model has hundreds.
        return None
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    state = _state_of_generator(value)
    if state is not None:
        return state
    held = _held_by(value)
    if held is None or not depth:
        return None
    if isinstance(held, Mapping):
        return {key: (each, content_of(each, depth - 1)) for key, each in held.items()}
    return [(each, content_of(each, depth - 1)) for each in held]


def put_content_back(value: Any, copied: Any) -> None:
    """Restore the content that a value had when `content_of` copied it."""
    if copied is None:
        return
    if isinstance(value, Tensor):
        if value.shape != copied.shape:
            value.data = copied.clone()
        elif not _same(value, copied):
            write(value, copied)
    elif isinstance(value, np.ndarray):
        if not _same(value, copied):
            value[...] = copied
    elif isinstance(value, torch.Generator):
        value.set_state(copied)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = pickle.loads(copied)
    elif isinstance(value, np.random.RandomState):
        value.set_state(pickle.loads(copied))
    elif isinstance(value, random.Random):
        value.setstate(copied)
    else:
        held = _inside(value)
        pairs = copied.values() if isinstance(copied, dict) else copied
        for each, content in pairs:
            put_content_back(each, content)
        if _same(value, copied):
            return
        if isinstance(held, MutableMapping):
            held.clear()
            held.update({key: each for key, (each, _) in copied.items()})
        elif isinstance(held, MutableSequence):
            held.clear()
            held.extend(each for each, _ in copied)


def same_numbers(now: Tensor, before: Tensor) -> bool:
    """Return whether two tensors of one shape hold the same numbers; NaN equals NaN.

    >>> same_numbers(torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan]))
    True
    """
    same = torch.equal(now, before)
    if same or not now.is_floating_point() or now.layout is not torch.strided:
        return same
    return bool(((now == before) | (now.isnan() & before.isnan())).all())


def write(tensor: Tensor, value: Tensor) -> None:
    """Write a value into a tensor and detach the tensor from any autograd graph."""
    with torch.no_grad():
        tensor.copy_(value)
    let_go(tensor)


def let_go(tensor: Tensor) -> None:
    """Detach a tensor from the graph of the pass that wrote it, so that no later backward pass runs through it."""
    if tensor.grad_fn is not None and tensor._base is None:
        tensor.detach_()


def _state_of_generator(value: Any) -> Any:
    """Return the state of a random generator; None for anything else."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    # As bytes, which can be compared at once: most of numpy's states are dicts with arrays.
    if isinstance(value, np.random.Generator):
        return pickle.dumps(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return pickle.dumps(value.get_state())
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate()
    return None


def _inside(value: Any) -> Any:
    """Return a container itself, or the attributes of an object."""
    return value if isinstance(value, (Mapping, list, tuple, deque)) else vars(value)


def _held_by(value: Any) -> Any:
    """Return a container, or the attributes of an object if tensors are among them; else None."""
    if isinstance(value, (Mapping, list, tuple, deque)):
        return value
    if isinstance(value, type) or callable(value) or not hasattr(value, "__dict__"):
        return None
    attributes = vars(value)
    inside = [each for one in attributes.values() for each in (one, *_entries(one))]
    return attributes if any(isinstance(each, Tensor | np.ndarray) for each in inside) else None


def _entries(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple, deque)) else []


def _same(value: Any, copied: Any) -> bool:
    """Return whether a value has the copied content."""
    if copied is None:
        return True
    if isinstance(value, Tensor):
        return value.shape == copied.shape and same_numbers(value.detach(), copied)
    if isinstance(value, np.ndarray):
        return np.array_equal(value, copied, equal_nan=value.dtype.kind in "fc")
    state = _state_of_generator(value)
    if state is not None:
        return torch.equal(state, copied) if isinstance(state, Tensor) else bool(state == copied)
    held = _inside(value)
    if isinstance(held, Mapping):
        return held.keys() == copied.keys() and all(
            held[key] is each and _same(each, content) for key, (each, content) in copied.items()
        )
    return len(held) == len(copied) and all(
        now is each and _same(now, content)
        for now, (each, content) in zip(held, copied, strict=True)
    )
