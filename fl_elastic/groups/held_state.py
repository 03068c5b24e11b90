"""What a model holds and changes outside of training steps: states between batches, and targets that follow."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, MutableMapping, MutableSequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_elastic.groups.trainable import trainable

__all__ = ["Attributes", "content_of", "followers", "put_content_back"]

# Bytes of all parameters of one shape.
_SMALL = 1 << 20
# Methods that an instance has in place of its class's, as while a part of a model runs another way, are no state.
_OF_TORCH = frozenset(vars(nn.Module())) | {"forward", "train"}


@dataclass(frozen=True, eq=False)
class Attributes:
    """Copies of what modules hold in plain attributes, as recurrent models hold the state of the batch before.

    Tensors, arrays and plain containers of them are copied; of any other object it is known which one it was.
    Parameters, buffers, modules and hooks are none of these.

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
        """Return the attributes of all modules of a model as they are now."""
        return cls(
            tuple(
                (module, {name: (value, content_of(value)) for name, value in _own(module)})
                for module in model.modules()
            )
        )

    def put_back(self) -> None:
        """Make all attributes what they were: the same objects, with the same content."""
        for module, before in self.held:
            for name, _ in _own(module):
                if name not in before:
                    del module.__dict__[name]
            for name, (value, copied) in before.items():
                module.__dict__[name] = value
                put_content_back(value, copied)

    def changed(self) -> list[str]:
        """Return the names of attributes that are another object or have another content, in order."""
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
    """Return parameters that may change without a gradient: what they are is part of what a model has learned.

    An exponential moving average requires no gradient and has the shape of what it follows. So of each shape as
    many that require none may follow as there are that are trained, and most of a large frozen base cannot; where
    they are small, all may. An embedding with ``max_norm`` scales its rows down where it is called.

    Examples
    --------
    >>> model = nn.ModuleDict({"online": nn.Linear(2, 2), "target": nn.Linear(2, 2)})
    >>> _ = model["target"].requires_grad_(False)
    >>> [tuple(each.shape) for each in followers(model)]
    [(2, 2), (2,)]
    """
    parameters = [each for each in model.parameters() if each.is_floating_point()]
    moving = Counter(each.shape for each in parameters if trainable(each))
    still: dict[torch.Size, list[nn.Parameter]] = {}
    for each in parameters:
        if not trainable(each):
            still.setdefault(each.shape, []).append(each)
    found = [
        each
        for shape, some in still.items()
        # Of more than can follow nobody says which do.
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


def content_of(value: Any) -> Any:
    """Return a copy of what a tensor, an array or a plain container of them holds; None for any other object.

    Parameters are other objects: who holds one in a list does not own it.
    """
    if isinstance(value, nn.Parameter):
        return None
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Mapping):
        return {key: (each, content_of(each)) for key, each in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [(each, content_of(each)) for each in value]
    return None


def put_content_back(value: Any, copied: Any) -> None:
    """Make a value hold what it held when `content_of` was asked."""
    if copied is None:
        return
    if isinstance(value, Tensor):
        if value.shape != copied.shape:
            value.data = copied.clone()
        elif not _same(value, copied):
            with torch.no_grad():
                value.copy_(copied)
    elif isinstance(value, np.ndarray):
        value[...] = copied
    elif isinstance(value, Mapping):
        for each, content in copied.values():
            put_content_back(each, content)
        if isinstance(value, MutableMapping) and not _same(value, copied):
            value.clear()
            value.update({key: each for key, (each, _) in copied.items()})
    elif isinstance(value, (list, tuple, deque)):
        for each, content in copied:
            put_content_back(each, content)
        if isinstance(value, MutableSequence) and not _same(value, copied):
            value.clear()
            value.extend(each for each, _ in copied)


def _same(value: Any, copied: Any) -> bool:
    """Whether a value has the content that it had."""
    if copied is None:
        return True
    if isinstance(value, Tensor):
        return value.shape == copied.shape and torch.equal(value.detach(), copied)
    if isinstance(value, np.ndarray):
        return np.array_equal(value, copied)
    if isinstance(value, Mapping):
        return value.keys() == copied.keys() and all(
            value[key] is each and _same(each, content) for key, (each, content) in copied.items()
        )
    if isinstance(value, (list, tuple, deque)):
        return len(value) == len(copied) and all(
            now is each and _same(now, content)
            for now, (each, content) in zip(value, copied, strict=True)
        )
    return True
