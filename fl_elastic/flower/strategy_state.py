"""What a strategy keeps from round to round: its state as named arrays, and the mean of its models."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from fl_elastic.aggregation import ModelAverage, ServerOptimizer
from fl_elastic.errors import CheckpointError
from fl_elastic.flower.round_zero import HeadCheckpoint
from fl_elastic.state.archive import Archive
from fl_elastic.state.codec import from_archive, to_archive
from fl_elastic.update.manifest import FROZEN_BASE, WeightDict

_LOG = logging.getLogger("fl_elastic")
_OBJECT = "!object!"
_MOST = 2**53
EvaluateFn: TypeAlias = Callable[[int, ArrayRecord], MetricRecord | None]


@runtime_checkable
class Remembering(Protocol):
    """An object with a state: a dataclass that `fl_elastic.state.codec` supports."""

    def to_state(self) -> Any:
        """Return the state that must survive a restart; always of the same class."""

    def restore(self, state: Any) -> None:
        """Restore what `to_state` returned."""


def as_record(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Return the arrays as one of Flower's records."""
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def own_settings(config: ConfigRecord | None) -> ConfigRecord:
    """Return a copy of the settings of a run, into which strategies write while those of the caller stay."""
    return ConfigRecord(dict(config or {}))


def names_of(strategy: Strategy, around: tuple[Strategy, ...] = ()) -> tuple[str, ...]:
    """Return the class names of the strategy and those it wraps, with server optimiser and average.

    A strategy may refer to those that wrap it (``around``); these are not named again.
    """
    values, around = list(vars(strategy).values()), (*around, strategy)
    kinds = (ServerOptimizer, ModelAverage)
    optimizers = [type(value).__name__ for value in values if isinstance(value, kinds)]
    inside = [each for each in values if isinstance(each, Strategy) and not _is_one(each, around)]
    name = " with ".join([type(strategy).__name__, *optimizers])
    return (name, *(name for each in inside for name in names_of(each, around)))


def collect(strategy: Strategy, begun: Mapping[str, float]) -> Archive:
    """Return the state of the strategy and of those it wraps, by attribute path.

    Parameters
    ----------
    strategy : Strategy
        The outermost strategy.
    begun : dict of str to float
        What `numbers_in` returned before the run; only numbers that have changed since are state.
    """
    facts: dict[str, Any] = {}
    state: dict[str, NDArray[Any]] = {}
    for where, value in _attributes(strategy):
        if isinstance(value, Remembering):
            kept = to_archive(value.to_state())
            facts[where] = kept.facts
            state |= {f"{where}{_OBJECT}{key}": array for key, array in kept.arrays.items()}
        elif isinstance(value, ArrayRecord):
            state |= {f"{where}!record!{key}": array.numpy() for key, array in value.items()}
        elif isinstance(value, dict) and value and _all_arrays(value.values()):
            state |= {f"{where}!dict!{key}": array for key, array in value.items()}
        elif isinstance(value, list) and value and _all_arrays(value):
            state |= {f"{where}!list!{index:06d}": array for index, array in enumerate(value)}
        elif _is_number(value) and float(value) != begun.get(where, np.nan):
            state[f"{where}!number!"] = np.array([begun.get(where, np.nan), value], np.float64)
    return Archive(facts, state)


def numbers_in(strategy: Strategy) -> dict[str, float]:
    """Return the numbers in the attributes of a strategy and of those it wraps, by attribute path."""
    return {where: float(value) for where, value in _attributes(strategy) if _is_number(value)}


def _attributes(
    strategy: Strategy, path: str = "", around: tuple[Strategy, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Yield path and value of each attribute that may be state, except those that are strategies."""
    around, keeps = (*around, strategy), getattr(strategy, "keeps", None)
    for name, value in vars(strategy).items():
        where = f"{path}{name}"
        if isinstance(value, Strategy):
            # A strategy that says what it keeps has its inner strategy in a public attribute.
            if not _is_one(value, around) and (keeps is None or not name.startswith("_")):
                yield from _attributes(value, f"{where}.", around)
        elif keeps is None or name in keeps:
            yield where, value


def _is_one(strategy: Strategy, of: Iterable[Strategy]) -> bool:
    return any(strategy is each for each in of)


def _is_number(value: object) -> bool:
    # Larger whole numbers, such as seeds, have no exact place among the doubles.
    if isinstance(value, (int, np.integer)):
        return abs(int(value)) <= _MOST
    return isinstance(value, (float, np.floating))


def _all_arrays(values: Iterable[object]) -> bool:
    # numpy turns results of zero-dimensional arrays into plain scalars.
    return all(isinstance(value, (np.ndarray, np.generic)) for value in values)


def restore(strategy: Strategy, state: Archive, begun: Mapping[str, float]) -> None:
    """Restore the state that `collect` returned.

    A number with which this run begins differently from the earlier one stays: its owner has changed a setting.

    Parameters
    ----------
    strategy : Strategy
        The outermost strategy.
    state : Archive
        What `collect` returned.
    begun : dict of str to float
        What `numbers_in` returned before this run.

    Raises
    ------
    CheckpointError
        If it names something that `collect` does not save, or does not fit the strategy.
    """
    try:
        _restore(strategy, state, begun)
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise CheckpointError(
            f"the checkpoint's state does not fit this strategy ({type(error).__name__}: {error}); "
            "use another directory or delete it"
        ) from None


def _restore(strategy: Strategy, state: Archive, begun: Mapping[str, float]) -> None:
    grouped: dict[tuple[str, str], dict[str, NDArray[Any]]] = {}
    grouped |= {(where, "object"): {} for where in state.facts}
    for entry, array in state.arrays.items():
        where, kind, key = entry.split("!", 2)
        grouped.setdefault((where, kind), {})[key] = array
    for (where, kind), entries in grouped.items():
        *parents, name = where.split(".")
        owner: Any = strategy
        for parent in parents:
            owner = _own(owner, parent)
            if not isinstance(owner, Strategy):
                raise CheckpointError(f"{where[:80]!r} is no state of a strategy")
        value = _own(owner, name)
        keeps = getattr(owner, "keeps", None)
        if keeps is not None and (name not in keeps or kind != "object"):
            raise CheckpointError(f"{where[:80]!r} is nothing that {type(owner).__name__} keeps")
        if any(array.dtype.kind not in "biuf" for array in entries.values()):
            raise CheckpointError(f"{where[:80]!r} holds something other than numbers")
        if not _may_become(kind, value):
            raise CheckpointError(f"{where[:80]!r} is no {kind[:20]!r} that a strategy keeps")
        if kind == "object":
            found = Archive(state.facts[where], entries)
            value.restore(from_archive(type(value.to_state()), found))
        elif kind == "number":
            given, reached = (float(each) for each in next(iter(entries.values())))
            now = begun.get(where, np.nan)
            if now == given or np.isnan([now, given]).all():
                setattr(owner, name, _as_number(reached, value))
            else:
                _LOG.warning(
                    "%s is %s, and was %s when the run of the checkpoint began: it is not set to the %s of its "
                    "last round",
                    where, now, given, reached,
                )  # fmt: skip
        else:
            setattr(owner, name, _restored(kind, entries))


def _own(owner: object, name: str) -> Any:
    """Return an attribute of the object itself, not one that its class defines; None if it does not exist yet."""
    foreign = name.startswith("__" if getattr(owner, "keeps", None) is None else "_")
    # A class may have a default for a number, or None for arrays; anything else there is no state.
    default = getattr(type(owner), name, None)
    if not name.isidentifier() or foreign or not (default is None or _is_number(default)):
        raise CheckpointError(f"{name[:80]!r} is nothing that {type(owner).__name__} keeps")
    return vars(owner).get(name, default)


def _may_become(kind: str, value: object) -> bool:
    """Return whether an attribute with this value may hold what was collected as this kind.

    None is accepted for arrays and numbers, because strategies begin with None and set them later.
    """
    if kind == "object":
        return isinstance(value, Remembering) and not isinstance(value, Strategy)
    if kind == "number":
        return value is None or _is_number(value)
    if kind == "record":
        return value is None or isinstance(value, ArrayRecord)
    if kind == "dict":
        return value is None or (isinstance(value, dict) and _all_arrays(value.values()))
    if kind == "list":
        return value is None or (isinstance(value, list) and _all_arrays(value))
    return False


def _as_number(reached: float, value: Any) -> float:
    """Return a number as an int, or a truth value, if the attribute holds one."""
    whole = isinstance(value, (int, np.integer)) and reached.is_integer()
    return type(value)(reached) if whole else reached


def _restored(kind: str, entries: dict[str, NDArray[Any]]) -> Any:
    if kind == "record":
        return as_record(entries)
    if kind == "dict":
        return entries
    return [entries[key] for key in sorted(entries)]


def averaged(strategy: Strategy, arrays: ArrayRecord) -> ArrayRecord:
    """Return the model to test: that of the last solved head, else the mean of past rounds, else ``arrays``."""
    solved, average = getattr(strategy, "solved", None), getattr(strategy, "average", None)
    found = _handed_out(solved, average)
    if not found:
        return arrays
    base = {FROZEN_BASE: arrays[FROZEN_BASE].numpy()} if FROZEN_BASE in arrays else {}
    return as_record(found | base)


def averaged_in(state: Archive, arrays: WeightDict) -> WeightDict:
    """Return what `averaged` would return, given the state that `collect` returned.

    Raises
    ------
    CheckpointError
        If the state is not that of a strategy of this version.
    """
    solved, average = HeadCheckpoint(), ModelAverage()
    kept: dict[str, Remembering] = {"solved": solved, "average": average}
    try:
        for name, value in kept.items():
            if name in state.facts:
                found = Archive(state.facts[name], state.under(f"{name}{_OBJECT}"))
                value.restore(from_archive(type(value.to_state()), found))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"the checkpoint's state does not say which model is the result ({type(error).__name__}: {error})"
        ) from None
    weights = _handed_out(solved, average)
    base = {FROZEN_BASE: arrays[FROZEN_BASE]} if FROZEN_BASE in arrays else {}
    return weights | base if weights else arrays


def _handed_out(solved: object, average: object) -> WeightDict:
    if isinstance(solved, HeadCheckpoint) and solved.weights:
        return dict(solved.weights)
    return average.weights() if isinstance(average, ModelAverage) and average.rounds else {}


def tested(strategy: Strategy, evaluate_fn: EvaluateFn | None) -> EvaluateFn | None:
    """Return the server's test function, applied to the mean model if the strategy keeps one."""
    if evaluate_fn is None:
        return None
    test = evaluate_fn
    return lambda server_round, arrays: test(server_round, averaged(strategy, arrays))
