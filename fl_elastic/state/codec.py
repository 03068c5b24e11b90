"""One codec between dataclasses and archives, driven by type hints: classes need no conversion code.

pydantic is not used: it does not support arrays, and builds a schema of each class in every process, even one that
lives for one message.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Any,
    Literal,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np

from fl_elastic.errors import ArchiveError, ElasticError
from fl_elastic.state.archive import Archive, Kind, read_archive, write_archive

T = TypeVar("T")
_MANY: dict[Any, Callable[[list[Any]], Any]] = {
    list: list, deque: deque, frozenset: frozenset, set: set,
}  # fmt: skip
_REAL = "biuf"
_REFUSALS = (ElasticError, ValueError, TypeError, OverflowError)


def to_archive(state: Any) -> Archive:
    """Return a dataclass as an archive.

    Parameters
    ----------
    state : dataclass
        Its fields are numbers, truth values, text, enumerations, real arrays, None, and dataclasses, tuples, lists,
        deques, sets and mappings of these; a mapping's keys are text or integers. Only fields that the constructor
        takes are kept.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> import numpy as np
    >>> @dataclass(frozen=True)
    ... class Moments:
    ...     count: int
    ...     mean: dict[str, np.ndarray]
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
    """Return the dataclass from its archive.

    Raises
    ------
    ArchiveError
        If the archive does not fit the class: a field is missing, unknown or of another type, or the class itself
        refuses a value.
    """
    arrays = dict(archive.arrays)
    found: T = _reader(cast(Hashable, kind))(archive.facts, None, arrays)
    if arrays:
        raise ArchiveError(
            f"it holds arrays {sorted(arrays)[:3]}, which {kind.__name__} does not have"
        )
    return found


def write_state(
    path: str | os.PathLike[str], kind: Kind, state: Any, *, durable: bool = True
) -> Path:
    """Write a dataclass to a file; see `to_archive` and `write_archive`."""
    archive = to_archive(state)
    return write_archive(path, kind, archive.facts, archive.arrays, durable=durable)


def read_state(form: type[T], path: str | os.PathLike[str], kind: Kind) -> T:
    """Read a file of `write_state` as a ``form``; see `from_archive` and `read_archive`."""
    return from_archive(form, read_archive(path, kind))


def _fact(value: Any, path: str, arrays: dict[str, Any]) -> Any:
    """Return the JSON form of a value, and add its arrays to ``arrays``."""
    if isinstance(value, np.ndarray):
        arrays[path] = value
        # The array is looked up by its path.
        return True
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        kept = [(field.name, getattr(value, field.name)) for field in fields(value) if field.init]
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


# A reader takes a fact, its place, and the arrays, from which it removes the value's arrays. A place is a name and
# the place that contains it; paths are only built when they are needed.
_Place: TypeAlias = "tuple[_Place | None, str | int] | None"
_Reader: TypeAlias = Callable[[Any, _Place, dict[str, Any]], Any]


def _path(place: _Place) -> str:
    names: list[str] = []
    while place is not None:
        place, name = place
        names.append(str(name))
    return "/".join(reversed(names)) or "state"


@lru_cache
def _reader(kind: Any) -> _Reader:
    """Return the reader of a type, for facts that `_fact` made."""
    origin, parts = get_origin(kind), get_args(kind)
    alias = origin or kind
    if hasattr(alias, "__value__"):
        # An alias by Python's ``type`` statement, as NDArray has been since numpy 2.5.
        return _reader(alias.__value__[parts] if parts else alias.__value__)
    if origin in (Union, UnionType):
        (some,) = (part for part in parts if part is not NoneType)
        read = _reader(some)
        return lambda fact, place, arrays: None if fact is None else read(fact, place, arrays)
    if kind is np.ndarray or origin is np.ndarray:
        return _array_reader(parts)
    if is_dataclass(kind):
        return _dataclass_reader(kind)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping_reader(*parts)
    if origin is tuple and parts[-1] is not Ellipsis:
        return _row_reader(parts)
    if origin is tuple or origin in _MANY:
        return _many_reader(_MANY.get(origin, tuple), parts[0])
    if kind is Any:
        return lambda fact, place, arrays: fact
    if origin is Literal:
        return lambda fact, place, arrays: parts[_made(parts.index, place, fact)]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return lambda fact, place, arrays: _made(kind, place, fact)
    return _plain_reader(kind)


def _plain_reader(kind: Any) -> _Reader:
    def read(fact: Any, place: _Place, arrays: dict[str, Any]) -> Any:
        if type(fact) is kind:
            return fact
        if kind is float and type(fact) is int:
            return _made(float, place, fact)
        return _of_type(kind, fact, place)

    return read


def _dataclass_reader(kind: Any) -> _Reader:
    hints = get_type_hints(kind)
    readers = {field.name: _reader(hints[field.name]) for field in fields(kind) if field.init}

    def read(fact: Any, place: _Place, arrays: dict[str, Any]) -> Any:
        given = _of_type(dict, fact, place)
        if readers.keys() != given.keys():
            missing, unknown = readers.keys() - given.keys(), given.keys() - readers.keys()
            raise ArchiveError(
                f"{_path(place)} ({kind.__name__}) lacks fields {sorted(missing)[:3]}, and does not know "
                f"the fields {sorted(unknown)[:3]}"
            )
        values = {name: each(given[name], (place, name), arrays) for name, each in readers.items()}
        try:
            return kind(**values)
        except _REFUSALS as error:
            raise _not_possible(place, error) from None

    return read


def _mapping_reader(keys: Any, values: Any) -> _Reader:
    read_value = _reader(values)

    def read(fact: Any, place: _Place, arrays: dict[str, Any]) -> Any:
        return {
            _made(int, place, name) if keys is int else name: read_value(
                each, (place, name), arrays
            )
            for name, each in _of_type(dict, fact, place).items()
        }

    return read


def _row_reader(kinds: tuple[Any, ...]) -> _Reader:
    readers = [_reader(kind) for kind in kinds]

    def read(fact: Any, place: _Place, arrays: dict[str, Any]) -> Any:
        given = _of_type(list, fact, place)
        if len(given) != len(readers):
            raise ArchiveError(f"{_path(place)} has {len(given)} entries, expected {len(readers)}")
        return tuple(each(given[i], (place, i), arrays) for i, each in enumerate(readers))

    return read


def _many_reader(make: Callable[[list[Any]], Any], kind: Any) -> _Reader:
    read_each = _reader(kind)

    def read(fact: Any, place: _Place, arrays: dict[str, Any]) -> Any:
        given = _of_type(list, fact, place)
        return make([read_each(each, (place, i), arrays) for i, each in enumerate(given)])

    return read


def _array_reader(parts: tuple[Any, ...]) -> _Reader:
    # NDArray[T] is ndarray[Any, dtype[T]].
    (wanted,) = get_args(parts[1]) if len(parts) > 1 else (Any,)

    def read(fact: Any, place: _Place, arrays: dict[str, Any]) -> Any:
        path = _path(place)
        array = arrays.pop(path, None)
        if fact is not True or array is None:
            raise ArchiveError(f"{path} is not an array")
        kinds = array.dtype.kind in _REAL if wanted is Any else issubclass(array.dtype.type, wanted)
        if not kinds:
            raise ArchiveError(f"{path} holds numbers of type {array.dtype}")
        return array

    return read


def _made(kind: Callable[[Any], Any], place: _Place, fact: Any) -> Any:
    """Return ``kind(fact)``; raise ArchiveError with the reason if the class refuses it."""
    try:
        return kind(fact)
    except _REFUSALS as error:
        raise _not_possible(place, error) from None


def _not_possible(place: _Place, error: Exception) -> ArchiveError:
    return ArchiveError(f"{_path(place)} is not possible: {str(error)[:200]}")


def _of_type(kind: Any, fact: Any, place: _Place) -> Any:
    if type(fact) is not kind:
        raise ArchiveError(f"{_path(place)} is {repr(fact)[:40]}, expected {kind.__name__}")
    return fact
