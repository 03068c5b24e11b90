"""The codec of state: what goes in comes out, of any nesting, and whatever else is refused with its place."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from typing_extensions import TypeAliasType

from fl_elastic.errors import ArchiveError, PlanError
from fl_elastic.state.archive import Archive, Kind, read_archive, write_archive
from fl_elastic.state.codec import from_archive, to_archive

KIND = Kind("test")


_Number = TypeVar("_Number", bound=np.generic)
Rows = TypeAliasType("Rows", np.ndarray[Any, np.dtype[_Number]], type_params=(_Number,))
Count = TypeAliasType("Count", int)


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, eq=False)
class Inner:
    name: str
    rows: NDArray[np.float32]
    weight: float | None = None


@dataclass(frozen=True, eq=False)
class Outer:
    count: int
    share: float
    on: bool
    colour: Colour
    note: str | None
    inner: Inner
    many: tuple[Inner, ...]
    pair: tuple[str, int]
    named: dict[str, NDArray[Any]]
    by_node: dict[int, float]
    seen: frozenset[str]
    recent: deque[int]
    free: Any
    maybe: NDArray[np.int64] | None = None
    derived: int = field(default=0, init=False)


floats = st.floats(allow_nan=False)
arrays32 = st.lists(st.floats(width=32), max_size=4).map(lambda rows: np.array(rows, np.float32))
inners = st.builds(Inner, name=st.text(max_size=4), rows=arrays32, weight=st.none() | floats)
outers = st.builds(
    Outer,
    count=st.integers(), share=floats, on=st.booleans(), colour=st.sampled_from(Colour),
    note=st.none() | st.text(max_size=5), inner=inners, many=st.lists(inners, max_size=3).map(tuple),
    pair=st.tuples(st.text(max_size=2), st.integers()),
    named=st.dictionaries(st.text(max_size=4), arrays32, max_size=3),
    by_node=st.dictionaries(st.integers(0, 2**64), floats, max_size=3),
    seen=st.frozensets(st.text(max_size=3), max_size=3), recent=st.lists(st.integers(), max_size=3).map(deque),
    free=st.none() | st.lists(st.integers(), max_size=2) | st.dictionaries(st.text(), st.booleans(), max_size=2),
    maybe=st.none() | st.lists(st.integers(-9, 9), max_size=3).map(lambda rows: np.array(rows, np.int64)),
)  # fmt: skip


def plain(value: Any) -> Any:
    """A value with arrays as bytes, by which two can be compared."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if dataclasses.is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, dict):
        return [(key, plain(each)) for key, each in value.items()]
    if isinstance(value, (tuple, list, deque)):
        return type(value), [plain(each) for each in value]
    return value


@given(outers)
def test_what_goes_in_comes_out(tmp_path_factory: pytest.TempPathFactory, state: Outer) -> None:
    archive = to_archive(state)
    assert plain(from_archive(Outer, archive)) == plain(state)
    path = tmp_path_factory.getbasetemp() / "state"
    write_archive(path, KIND, archive.facts, archive.arrays)
    assert plain(from_archive(Outer, read_archive(path, KIND))) == plain(state)


@dataclass(frozen=True, eq=False)
class Aliased:
    count: Count
    rows: Rows[np.float32]


def test_a_type_may_have_another_name() -> None:
    state = Aliased(2, np.ones(2, np.float32))
    assert plain(from_archive(Aliased, to_archive(state))) == plain(state)
    with pytest.raises(ArchiveError, match="rows holds numbers of type int64"):
        from_archive(Aliased, to_archive(Aliased(2, np.ones(2, np.int64))))


def test_numbers_that_json_has_no_word_for_come_back(tmp_path: Path) -> None:
    archive = to_archive(Inner("a", np.zeros(0, np.float32), math.inf))
    write_archive(tmp_path / "state", KIND, archive.facts, archive.arrays)
    assert from_archive(Inner, read_archive(tmp_path / "state", KIND)).weight == math.inf


GOOD = Outer(
    3, 0.5, True, Colour.RED, None, Inner("a", np.ones(2, np.float32)), (Inner("b", np.zeros(1, np.float32)),),
    ("x", 1), {"w": np.ones((2, 2))}, {7: 0.5}, frozenset({"s"}), deque([1]), None, np.arange(3),
)  # fmt: skip


@pytest.mark.parametrize(
    ("path", "wrong", "said"),
    [
        ("count", True, "count is True, expected int"),
        ("count", 3.0, "count is 3.0"),
        ("share", "0.5", "share is '0.5', expected float"),
        ("on", 1, "on is 1"),
        ("colour", "green", "colour is not possible"),
        ("inner", [], "inner is \\[\\], expected dict"),
        ("many", {}, "many is {}, expected list"),
        ("pair", ["x"], "pair has 1 entries, expected 2"),
        ("named", {"v": True}, "named/v is not an array"),
        ("named", {"w": 3}, "named/w is not an array"),
        ("by_node", {"seven": 0.5}, "by_node is not possible"),
        ("by_node", {"7": None}, "by_node/7 is None"),
        ("seen", [3], "seen/0 is 3"),
        ("maybe", 2, "maybe is not an array"),
    ],
)
def test_what_is_of_another_type_is_refused_with_its_place(
    path: str, wrong: Any, said: str
) -> None:
    archive = to_archive(GOOD)
    with pytest.raises(ArchiveError, match=said):
        from_archive(Outer, Archive({**archive.facts, path: wrong}, archive.arrays))


def test_fields_that_are_missing_or_unknown_are_named() -> None:
    archive = to_archive(GOOD.inner)
    without = {name: each for name, each in archive.facts.items() if name != "name"}
    with pytest.raises(
        ArchiveError,
        match=r"state \(Inner\) lacks fields \['name'\], and does not know the fields \['other'\]",
    ):
        from_archive(Inner, Archive({**without, "other": 1}, archive.arrays))


def test_arrays_that_no_field_has_are_named() -> None:
    archive = to_archive(GOOD.inner)
    with pytest.raises(
        ArchiveError, match=r"it holds arrays \['more'\], which Inner does not have"
    ):
        from_archive(Inner, Archive(archive.facts, {**archive.arrays, "more": np.ones(1)}))


@pytest.mark.parametrize("array", [np.ones(2), np.array(["a"]), np.ones(2, np.complex64)])
def test_arrays_of_another_type_are_refused(array: NDArray[Any]) -> None:
    archive = to_archive(GOOD.inner)
    with pytest.raises(ArchiveError, match=f"rows holds numbers of type {array.dtype}"):
        from_archive(Inner, Archive(archive.facts, {"rows": array}))


def test_what_the_class_itself_refuses_says_why() -> None:
    @dataclass(frozen=True)
    class Rate:
        value: float

        def __post_init__(self) -> None:
            if not 0 < self.value <= 1:
                raise PlanError(f"a rate of {self.value} is none")

    assert from_archive(Rate, to_archive(Rate(0.5))) == Rate(0.5)
    with pytest.raises(ArchiveError, match=r"state is not possible: a rate of 2\.0 is none"):
        from_archive(Rate, Archive({"value": 2.0}, {}))
