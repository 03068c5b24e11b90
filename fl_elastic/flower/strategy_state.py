"""What a strategy carries from round to round, as named arrays, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from fl_elastic.aggregation import ModelAverage, ServerOptimizer

__all__ = ["Remembering", "as_record", "collect", "names_of", "restore"]


@runtime_checkable
class Remembering(Protocol):
    """An object with a state of its own."""

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return what must outlast a restart."""

    def from_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put back what `to_arrays` gave."""


def as_record(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Return arrays as Flower's record of them."""
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def names_of(strategy: Strategy) -> tuple[str, ...]:
    """Return the class names of the strategy, with its server optimiser and average, and of those it wraps."""
    values = list(vars(strategy).values())
    kinds = (ServerOptimizer, ModelAverage)
    optimizers = [type(value).__name__ for value in values if isinstance(value, kinds)]
    inside = [value for value in values if isinstance(value, Strategy)]
    name = " with ".join([type(strategy).__name__, *optimizers])
    return (name, *(name for each in inside for name in names_of(each)))


def collect(strategy: Strategy, path: str = "") -> dict[str, NDArray[Any]]:
    """Return the arrays that the strategy and those it wraps carry from round to round."""
    state: dict[str, NDArray[Any]] = {}
    for name, value in vars(strategy).items():
        where = f"{path}{name}"
        if name.startswith("_"):
            continue
        if isinstance(value, Strategy):
            state |= collect(value, f"{where}.")
        elif isinstance(value, Remembering):
            state |= {f"{where}!object!{key}": array for key, array in value.to_arrays().items()}
        elif isinstance(value, ArrayRecord):
            state |= {f"{where}!record!{key}": array.numpy() for key, array in value.items()}
        elif isinstance(value, dict) and value and _all_arrays(value.values()):
            state |= {f"{where}!dict!{key}": array for key, array in value.items()}
        elif isinstance(value, list) and value and _all_arrays(value):
            state |= {f"{where}!list!{index:06d}": array for index, array in enumerate(value)}
        elif name == "clipping_norm":
            # Adaptive clipping learns it.
            state[f"{where}!number!"] = np.array(value)
    return state


def _all_arrays(values: Iterable[object]) -> bool:
    # What numpy computes from arrays without dimensions are bare numbers.
    return all(isinstance(value, (np.ndarray, np.generic)) for value in values)


def restore(strategy: Strategy, state: dict[str, NDArray[Any]]) -> None:
    """Put what `collect` found back into the strategies."""
    grouped: dict[tuple[str, str], dict[str, NDArray[Any]]] = {}
    for entry, array in state.items():
        where, kind, key = entry.split("!", 2)
        grouped.setdefault((where, kind), {})[key] = array
    for (where, kind), entries in grouped.items():
        *parents, name = where.split(".")
        owner: Any = strategy
        for parent in parents:
            owner = getattr(owner, parent)
        if kind == "object":
            getattr(owner, name).from_arrays(entries)
        else:
            setattr(owner, name, _restored(kind, entries))


def _restored(kind: str, entries: dict[str, NDArray[Any]]) -> Any:
    if kind == "record":
        return as_record(entries)
    if kind == "dict":
        return entries
    in_order = [entries[key] for key in sorted(entries)]
    return in_order if kind == "list" else float(in_order[0])
