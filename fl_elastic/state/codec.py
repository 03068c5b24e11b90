"""One codec between dataclasses and archives: a class writes down its fields, and nobody a conversion.

Why not pydantic: it knows no arrays, and builds a schema of each class in every process that lives for one message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from fl_elastic.errors import ArchiveError, ElasticError
from fl_elastic.state.archive import Archive

__all__ = ["from_archive", "to_archive"]

T = TypeVar("T")
_MANY: dict[Any, Callable[[list[Any]], Any]] = {
    list: list, deque: deque, frozenset: frozenset, set: set,
}  # fmt: skip
_REAL = "biuf"


def to_archive(state: Any) -> Archive:
    """Return a dataclass as an archive.

    Parameters
    ----------
    state : dataclass
        Its fields are numbers, truth values, text, enumerations, real arrays, None, and dataclasses, tuples, lists,
        deques, sets and mappings of them; a mapping's keys are text or whole numbers. Only fields that the
        constructor takes are kept.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> from numpy.typing import NDArray
    >>> @dataclass(frozen=True)
    ... class Moments:
    ...     count: int
    ...     mean: dict[str, NDArray[np.float64]]
    >>> archive = to_archive(Moments(3, {"weight": np.ones(2)}))
    >>> archive.facts, list(archive.arrays)
    ({'count': 3, 'mean': {'weight': True}}, ['mean/weight'])
    >>> from_archive(Moments, archive)
    Moments(count=3, mean={'weight': array([1., 1.])})
    """
    arrays: dict[str, Any] = {}
    facts: dict[str, Any] = _fact(state, "", arrays)
    return Archive(facts, arrays)


def from_archive(kind: type[T], archive: Archive) -> T:
    """Return the dataclass that `to_archive` made an archive of.

    Raises
    ------
    ArchiveError
        If the archive is of something else: a field that is missing, unknown or of another type, or a value that
        the class itself refuses.
    """
    found: T = _value(kind, archive.facts, "", archive.arrays)
    return found


def _fact(value: Any, path: str, arrays: dict[str, Any]) -> Any:
    """Return what JSON can hold of a value, and enter its arrays."""
    if isinstance(value, np.ndarray):
        arrays[path] = value
        # Its place is its path.
        return True
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        kept = [(each.name, getattr(value, each.name)) for each in fields(value) if each.init]
    elif isinstance(value, Mapping):
        kept = [(str(key), each) for key, each in value.items()]
    elif isinstance(value, (tuple, list, deque, frozenset, set)):
        each_value = sorted(value) if isinstance(value, (frozenset, set)) else value
        return [_fact(each, _under(path, i), arrays) for i, each in enumerate(each_value)]
    else:
        return value.item() if isinstance(value, np.generic) else value
    return {name: _fact(each, _under(path, name), arrays) for name, each in kept}


def _under(path: str, name: str | int) -> str:
    return f"{path}/{name}" if path else str(name)


def _value(kind: Any, fact: Any, path: str, arrays: Mapping[str, Any]) -> Any:
    """Return the value of a type that `_fact` gave."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _value(parts[0], fact, path, arrays)
    if origin in (Union, UnionType):
        if fact is None and NoneType in parts:
            return None
        (kind,) = (each for each in parts if each is not NoneType)
        return _value(kind, fact, path, arrays)
    if kind is np.ndarray or origin is np.ndarray:
        return _array(parts, fact, path, arrays)
    if is_dataclass(kind):
        return _dataclass(kind, fact, path, arrays)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        keys, values = parts
        return {
            _key(keys, name, path): _value(values, each, _under(path, name), arrays)
            for name, each in _of_type(dict, fact, path).items()
        }
    if origin is tuple or origin in _MANY:
        return _many(origin, parts, _of_type(list, fact, path), path, arrays)
    if kind is Any:
        return fact
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _made(kind, path, fact)
    if kind is float and type(fact) is int:
        return _made(float, path, fact)
    return _of_type(kind, fact, path)


def _many(
    origin: Any, parts: tuple[Any, ...], facts: list[Any], path: str, arrays: Mapping[str, Any]
) -> Any:
    kinds = list(parts)
    if origin is not tuple or kinds[-1] is Ellipsis:
        kinds = [parts[0]] * len(facts)
    if len(kinds) != len(facts):
        raise ArchiveError(f"{path} has {len(facts)} entries, expected {len(kinds)}")
    pairs = zip(kinds, facts, strict=True)
    found = [_value(each, fact, _under(path, i), arrays) for i, (each, fact) in enumerate(pairs)]
    return _MANY.get(origin, tuple)(found)


def _dataclass(kind: Any, fact: Any, path: str, arrays: Mapping[str, Any]) -> Any:
    expected, given = _fields_of(kind), _of_type(dict, fact, path)
    if expected.keys() != given.keys():
        missing, unknown = expected.keys() - given.keys(), given.keys() - expected.keys()
        raise ArchiveError(
            f"{path or kind.__name__} has no {sorted(missing)[:3]} and unknown {sorted(unknown)[:3]}"
        )
    values = {
        name: _value(each, given[name], _under(path, name), arrays)
        for name, each in expected.items()
    }
    return _made(lambda named: kind(**named), path or kind.__name__, values)


def _made(kind: Callable[[Any], Any], path: str, fact: Any) -> Any:
    """Return what a class makes of a value, or say why it refuses it."""
    try:
        return kind(fact)
    except (ElasticError, ValueError, TypeError, OverflowError) as error:
        raise ArchiveError(f"{path} is not possible: {str(error)[:200]}") from None


@lru_cache
def _fields_of(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind) if each.init}


def _array(parts: tuple[Any, ...], fact: Any, path: str, arrays: Mapping[str, Any]) -> Any:
    array = arrays.get(path)
    if fact is not True or array is None:
        raise ArchiveError(f"{path} is no array")
    # NDArray[T] is ndarray[Any, dtype[T]].
    (wanted,) = get_args(parts[1]) if len(parts) > 1 else (Any,)
    fits = array.dtype.kind in _REAL if wanted is Any else issubclass(array.dtype.type, wanted)
    if not fits:
        raise ArchiveError(f"{path} holds numbers of type {array.dtype}")
    return array


def _key(kind: Any, name: str, path: str) -> Any:
    if kind is int:
        return _made(int, path, name)
    return name


def _of_type(kind: Any, fact: Any, path: str) -> Any:
    if type(fact) is not kind:
        raise ArchiveError(
            f"{path or 'state'} is {repr(fact)[:40]}, expected {getattr(kind, '__name__', kind)}"
        )
    return fact
