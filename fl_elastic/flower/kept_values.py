"""Convert the values of a strategy's attributes to the form that a checkpoint stores, and back."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, MetricRecord
from numpy.typing import NDArray

from fl_elastic.update.manifest import array_of

_MANY: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "deque": deque}
_NAMED: dict[str, Any] = {"dict": dict, "metrics": MetricRecord, "config": ConfigRecord}
_REAL = "biuf"
STATE = "state"
"""Kind of an object that has a state."""


class NotKeptError(Exception):
    """A value that a checkpoint cannot hold."""


def state_of(value: Any) -> Any:
    """Return the state of a random generator, a torch parameter, or an object with ``state_dict``; None otherwise.

    Privacy accountants and torch's optimisers have ``state_dict``. Models have it too but are left out, because a
    model in an attribute, such as a teacher for distillation, is large and does not change.

    >>> state_of(0.5) is None
    True
    """
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, random.Random):
        return value.getstate()
    if _is_parameter(value):
        return value.detach()
    return value.state_dict() if _has_state_dict(value) else None


def set_state(value: Any, state: Any) -> None:
    """Restore what `state_of` returned.

    Raises
    ------
    ValueError, TypeError
        If the object refuses it.
    """
    if isinstance(value, np.random.Generator):
        value.bit_generator.state = state
    elif isinstance(value, random.Random):
        value.setstate(state)
    elif _is_parameter(value):
        # In place: an optimiser may hold it.
        value.detach().copy_(state)
    else:
        value.load_state_dict(state)


def _is_parameter(value: object) -> bool:
    # Only a strategy that has imported torch can hold one.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Parameter)


def _has_state_dict(value: Any) -> bool:
    owns = all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))
    return owns and not isinstance(value, type) and not hasattr(value, "named_parameters")


def to_fact(value: Any, arrays: dict[str, NDArray[Any]], place: str = "") -> Any:
    """Return a value in a form that JSON can hold, and add its arrays to ``arrays``.

    Parameters
    ----------
    value : object
        A number, truth value, text, None, array, tensor, an object with a state (`state_of`), or a list, tuple,
        set, deque, dict, MetricRecord or ConfigRecord of these.
    arrays : dict of str to ndarray
        Gets the arrays.
    place : str
        Prefix of the names of the value's arrays in ``arrays``.

    Raises
    ------
    NotKeptError
        If it is anything else.

    Examples
    --------
    >>> arrays = {}
    >>> fact = to_fact({3: [0.5, np.ones(2)]}, arrays)
    >>> from_fact(fact, arrays)
    {3: [0.5, array([1., 1.])]}
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.generic) and value.dtype.kind in _REAL and value.dtype.itemsize <= 8:
        return {"scalar": [value.dtype.str, value.item()]}
    array = _array(value)
    if array is not None and array.dtype.kind in _REAL:
        name = place or "0"
        arrays[name] = array
        if array is value:
            return {"array": name}
        return {"tensor": name, "as": [str(value.dtype).removeprefix("torch."), str(value.device)]}
    state = state_of(value)
    if state is not None:
        return {STATE: to_fact(state, arrays, place)}
    for kind, of in _MANY.items():
        if type(value) is of:
            each = sorted(value, key=repr) if kind == "set" else value
            facts = [to_fact(one, arrays, f"{place}/{i}") for i, one in enumerate(each)]
            return {kind: facts, **({"longest": value.maxlen} if kind == "deque" else {})}
    for kind, of in _NAMED.items():
        if type(value) is of:
            return {
                kind: [
                    [to_fact(key, arrays, f"{place}/{i}!"), to_fact(one, arrays, f"{place}/{i}")]
                    for i, (key, one) in enumerate(value.items())
                ]
            }
    raise NotKeptError(f"a {type(value).__name__} cannot be kept")


def from_fact(fact: Any, arrays: Mapping[str, NDArray[Any]]) -> Any:
    """Return the value that `to_fact` converted; for an object with a state, that state.

    Raises
    ------
    ValueError, KeyError, TypeError
        If `to_fact` returns this for no value.
    """
    if not isinstance(fact, dict):
        return fact
    kind = next(iter(fact), "")
    content = fact[kind]
    if kind == "scalar":
        dtype, number = content
        return np.dtype(dtype).type(number)
    if kind == "array":
        return arrays[content]
    if kind == "tensor":
        return _tensor(arrays[content], *fact["as"])
    if kind == STATE:
        return from_fact(content, arrays)
    if kind in _MANY:
        longest = {"maxlen": fact["longest"]} if kind == "deque" else {}
        return _MANY[kind]((from_fact(each, arrays) for each in content), **longest)
    pairs = [(from_fact(key, arrays), from_fact(each, arrays)) for key, each in content]
    return _NAMED[kind](dict(pairs))


def form_of(fact: Any) -> str:
    """Return the kind of a value; a checkpoint may replace an attribute's value only by one of the same kind.

    >>> form_of(True), form_of(0.5), form_of("x"), form_of({"list": []})
    ('number', 'number', 'str', 'list')
    """
    if isinstance(fact, dict):
        kind = str(next(iter(fact), ""))
        return "number" if kind == "scalar" else kind
    return "number" if isinstance(fact, (bool, int, float)) else type(fact).__name__


def _array(value: Any) -> NDArray[Any] | None:
    """Return an array, or a tensor without gradient as an array; None for any other value."""
    if type(value) is np.ndarray:
        return value
    torch = sys.modules.get("torch")
    is_tensor = torch is not None and type(value) is torch.Tensor and not value.requires_grad
    return array_of(value) if is_tensor else None


def _tensor(array: NDArray[Any], dtype: str, device: str) -> Any:
    import torch

    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"{dtype[:40]!r} is not a dtype of torch")
    try:
        return torch.tensor(array, dtype=kind, device=device)
    except RuntimeError as error:
        raise ValueError(f"no tensor on {device[:40]!r}: {error}") from None
