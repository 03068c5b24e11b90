"""State of a strategy between rounds, in the form of a checkpoint; and the model that a run tests and returns."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from fl_elastic.aggregation import ModelAverage, ServerOptimizer
from fl_elastic.errors import CheckpointError
from fl_elastic.flower.kept_values import (
    STATE,
    NotKeptError,
    form_of,
    from_fact,
    set_state,
    state_of,
    to_fact,
)
from fl_elastic.flower.records import as_record
from fl_elastic.flower.round_zero import HeadCheckpoint
from fl_elastic.state.archive import Archive
from fl_elastic.state.codec import from_archive, to_archive
from fl_elastic.update.manifest import FROZEN_BASE, WeightDict

_LOG = logging.getLogger("fl_elastic")
_OBJECT, _VALUE = "!object!", "!value!"
# A list may contain itself, and Python refuses to write a number of thousands of digits.
_NOT_KEPT = (NotKeptError, RecursionError, ValueError)
EvaluateFn: TypeAlias = Callable[[int, ArrayRecord], MetricRecord | None]


@runtime_checkable
class Remembering(Protocol):
    """An object whose state goes into the checkpoint, as a dataclass that `fl_elastic.state.codec` supports."""

    def to_state(self) -> Any:
        """Return the state that must survive a restart; always of the same class."""

    def restore(self, state: Any) -> None:
        """Restore what `to_state` returned."""


def own_settings(config: ConfigRecord | None) -> ConfigRecord:
    """Return a copy of a run's settings, so that strategies do not change the caller's."""
    return ConfigRecord(dict(config or {}))


def names_of(strategy: Strategy, around: tuple[Strategy, ...] = ()) -> tuple[str, ...]:
    """Return the class names of a strategy and of those it wraps, with their server optimisers and averages.

    The strategies in ``around`` wrap this one, which may refer to them; they are not named again.
    """
    values, around = list(vars(strategy).values()), (*around, strategy)
    kinds = (ServerOptimizer, ModelAverage)
    optimizers = [type(value).__name__ for value in values if isinstance(value, kinds)]
    inside = [each for each in values if isinstance(each, Strategy) and not _is_one(each, around)]
    name = " with ".join([type(strategy).__name__, *optimizers])
    return (name, *(name for each in inside for name in names_of(each, around)))


def collect(strategy: Strategy, begun: Mapping[str, str]) -> Archive:
    """Return the state of the strategy and of those it wraps, by attribute path.

    Parameters
    ----------
    strategy : Strategy
        The outermost strategy.
    begun : dict of str to str
        Result of `plain_values` before the run; only values that have changed since are state.
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
        else:
            arrays: dict[str, NDArray[Any]] = {}
            with suppress(*_NOT_KEPT):
                reached = to_fact(value, arrays)
                # Unchanged values are not stored: a strategy may also hold data, which may be large.
                if _text(reached, arrays) != begun.get(where) or form_of(reached) == STATE:
                    facts[f"{where}{_VALUE}"] = [begun.get(where), reached]
                    state |= {f"{where}{_VALUE}{key}": array for key, array in arrays.items()}
    return Archive(facts, state)


def plain_values(strategy: Strategy) -> dict[str, str]:
    """Return the attributes of a strategy and of those it wraps, by path, as JSON and a digest of their arrays."""
    found = {}
    for where, value in _attributes(strategy):
        arrays: dict[str, NDArray[Any]] = {}
        with suppress(*_NOT_KEPT):
            found[where] = _text(to_fact(value, arrays), arrays)
    return found


def _text(fact: Any, arrays: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays.values():
        digest.update(f"{array.dtype}/{array.shape}/".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return json.dumps(fact) + (f" {digest.hexdigest()}" if arrays else "")


def _attributes(
    strategy: Strategy, path: str = "", around: tuple[Strategy, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Yield path and value of each attribute that may be state, except those that are strategies."""
    around, keeps = (*around, strategy), getattr(strategy, "keeps", None)
    for name, value in vars(strategy).items():
        where = f"{path}{name}"
        if isinstance(value, Strategy):
            # A strategy that lists its state in ``keeps`` has its inner strategy in a public attribute.
            if not _is_one(value, around) and (keeps is None or not name.startswith("_")):
                yield from _attributes(value, f"{where}.", around)
        # Only objects with a state are kept of such a strategy; a listed attribute may also be None.
        elif keeps is None or (name in keeps and isinstance(value, Remembering)):
            yield where, value


def _is_one(strategy: Strategy, of: Iterable[Strategy]) -> bool:
    return any(strategy is each for each in of)


def restore(strategy: Strategy, state: Archive, begun: Mapping[str, str]) -> None:
    """Restore the state that `collect` returned.

    A setting that the user has changed since the earlier run keeps its new value.

    Parameters
    ----------
    strategy : Strategy
        The outermost strategy.
    state : Archive
        Result of `collect`.
    begun : dict of str to str
        Result of `plain_values` before this run.

    Raises
    ------
    CheckpointError
        If ``state`` names something that `collect` does not save, or does not fit the strategy.
    """
    try:
        _restore(strategy, state, begun)
    except CheckpointError:
        raise
    except (
        NotKeptError, KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError,
        RecursionError,
    ) as error:  # fmt: skip
        raise CheckpointError(
            f"the checkpoint's state does not fit this strategy ({type(error).__name__}: {error}); "
            "use another directory or delete it"
        ) from None


def _restore(strategy: Strategy, state: Archive, begun: Mapping[str, str]) -> None:
    grouped: dict[tuple[str, str], dict[str, NDArray[Any]]] = {}
    for entry in state.facts:
        where, _, rest = entry.partition("!")
        grouped[where, rest.split("!", 1)[0] or "object"] = {}
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
            raise CheckpointError(f"{type(owner).__name__} keeps no state named {where[:80]!r}")
        if any(array.dtype.kind not in "biuf" for array in entries.values()):
            raise CheckpointError(f"{where[:80]!r} holds something other than numbers")
        if kind == "object" and isinstance(value, Remembering) and not isinstance(value, Strategy):
            found = Archive(state.facts[where], entries)
            value.restore(from_archive(type(value.to_state()), found))
        elif kind == "record" and (value is None or isinstance(value, ArrayRecord)):
            setattr(owner, name, as_record(entries))
        elif kind == "value":
            given, reached = state.facts[f"{where}{_VALUE}"]
            # Arrays and states of objects, such as a privacy accountant's, are not settings: they are restored even
            # if the settings differ, or the object refuses them.
            if given == begun.get(where) or entries or form_of(reached) == STATE:
                _set(owner, name, where, reached, entries)
            else:
                _LOG.warning(
                    "%s is %s, but was %s when the run of the checkpoint began: it keeps its new value and is not "
                    "set to %s, the value after the last round",
                    where, begun.get(where), given, json.dumps(reached),
                )  # fmt: skip
        else:
            raise CheckpointError(f"{where[:80]!r} is no {kind[:20]!r} that a strategy keeps")


def _set(
    owner: Strategy, name: str, where: str, reached: Any, arrays: dict[str, NDArray[Any]]
) -> None:
    """Set an attribute to the value in a checkpoint, if its present value is of the same kind or None."""
    value, form = _own(owner, name), form_of(reached)
    own = form_of(to_fact(value, {}))
    if form != own and "NoneType" not in (form, own):
        raise CheckpointError(f"{where[:80]!r} is no {form[:20]!r} that a strategy keeps")
    if form == own == STATE:
        set_state(value, from_fact(reached, arrays))
    elif form == STATE:
        _LOG.warning(
            "%s is None, but was an object with a state in the run of the checkpoint: this state is not restored",
            where,
        )
    else:
        setattr(owner, name, from_fact(reached, arrays))


def _own(owner: object, name: str) -> Any:
    """Return an attribute that may be state; the class's default, or None, if the object does not have it yet."""
    foreign = name.startswith("__" if getattr(owner, "keeps", None) is None else "_")
    default = getattr(type(owner), name, None)
    if not name.isidentifier() or foreign or not _is_plain(default):
        raise CheckpointError(f"{name[:80]!r} is nothing that {type(owner).__name__} keeps")
    return vars(owner).get(name, default)


def _is_plain(value: object) -> bool:
    """Return whether a value in a class may be the default of state, that is, no method, descriptor or object."""
    try:
        to_fact(value, {})
    except _NOT_KEPT:
        return False
    return state_of(value) is None


def averaged(strategy: Strategy, arrays: ArrayRecord) -> ArrayRecord:
    """Return the model to test: that of the last solve of the head, else the mean of models, else ``arrays``."""
    solved, average = getattr(strategy, "solved", None), getattr(strategy, "average", None)
    found = _handed_out(solved, average)
    if not found:
        return arrays
    base = {FROZEN_BASE: arrays[FROZEN_BASE].numpy()} if FROZEN_BASE in arrays else {}
    return as_record(found | base)


def averaged_in(state: Archive, arrays: WeightDict) -> WeightDict:
    """Return the model that `averaged` would return, given the state that `collect` returned.

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
    """Return the server's test function, applied to the model that `averaged` returns; None without a function."""
    if evaluate_fn is None:
        return None
    test = evaluate_fn
    return lambda server_round, arrays: test(server_round, averaged(strategy, arrays))
