"""Archives: what was kept comes back bit for bit, and whatever else is in a file is one error of the family."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crafted_archives import sealed, text_of
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fl_elastic.errors import ArchiveError, ArchiveVersionError, ElasticError
from fl_elastic.state.archive import Kind, read_archive, write_archive

KIND = Kind("test", 2)
SMALL = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(7), "e": np.zeros((0, 3))}
FACTS = {"round": 3, "names": ["ä", "b"], "none": None, "rate": 0.1}

dtypes = st.sampled_from("? i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8 c8 c16 U1 U7 >f4 >i8".split()).map(
    np.dtype
)
shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3)
arrays = dtypes.flatmap(lambda dtype: hnp.arrays(dtype, shapes))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=9,
)


def same(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether shape, type and bits are the same; the order of bytes is the machine's."""
    native = other.astype(other.dtype.newbyteorder("="))
    return (one.shape, one.dtype, one.tobytes()) == (native.shape, native.dtype, native.tobytes())


@given(
    facts=st.dictionaries(st.text(max_size=5), json_values, max_size=4),
    kept=st.dictionaries(st.text(max_size=5), arrays, max_size=4),
)
def test_everything_comes_back(
    tmp_path_factory: pytest.TempPathFactory, facts: dict[str, Any], kept: dict[str, np.ndarray]
) -> None:
    path = tmp_path_factory.getbasetemp() / "deep" / "archive"
    assert write_archive(path, KIND, facts, kept) == path
    found = read_archive(path, KIND)
    assert found.facts == facts and list(found.arrays) == list(kept)
    assert all(same(found.arrays[name], array) for name, array in kept.items())
    assert all(array.flags.writeable for array in found.arrays.values())


def test_numbers_need_not_lie_in_order(tmp_path: Path) -> None:
    whole = np.arange(24.0).reshape(2, 3, 4)
    views = {
        "columns": np.asfortranarray(whole), "turned": whole.transpose(2, 0, 1),
        "every second": whole[:, ::2], "backwards": whole[::-1], "bare": np.float32(2.5),
    }  # fmt: skip
    write_archive(tmp_path / "a", KIND, {}, views)
    found = read_archive(tmp_path / "a", KIND).arrays
    assert all(same(found[name], np.asarray(view)) for name, view in views.items())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_archive(tmp_path / "archive", KIND, FACTS, SMALL)


def refused(path: Path, kind: Kind = KIND, **options: Any) -> str:
    with pytest.raises(ArchiveError) as caught:
        read_archive(path, kind, **options)
    assert isinstance(caught.value, ElasticError) and isinstance(caught.value, ValueError)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400
    return message


def test_every_truncation_and_every_longer_file_is_refused(path: Path) -> None:
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        refused(path)
    for more in (b"\0", b"x" * 100, whole):
        path.write_bytes(whole + more)
        refused(path)


def test_every_changed_byte_is_refused(path: Path) -> None:
    whole = path.read_bytes()
    for place in range(len(whole)):
        for flip in (1, 0x80, 0xFF):
            data = bytearray(whole)
            data[place] ^= flip
            path.write_bytes(bytes(data))
            assert "damaged" in refused(path)
    path.write_bytes(whole)
    assert read_archive(path, KIND).facts == FACTS


def test_another_kind_is_refused(path: Path) -> None:
    assert "holds 'test', expected 'other'" in refused(path, Kind("other", 2))


def test_another_version_is_an_error_of_its_own(path: Path) -> None:
    for kind in (Kind("test", 1), Kind("test", 3)):
        with pytest.raises(ArchiveVersionError, match=f"has version 2, expected {kind.version}"):
            read_archive(path, kind)
    text = json.dumps(text_of(path)).encode()
    path.write_bytes(sealed(text, version=2))
    with pytest.raises(ArchiveVersionError, match="archive of version 2, expected 1"):
        read_archive(path, KIND)


def test_a_longer_file_than_is_expected_is_refused(path: Path) -> None:
    size = path.stat().st_size
    assert read_archive(path, KIND, most=size).facts == FACTS
    assert f"holds {size} bytes, at most {size - 1}" in refused(path, most=size - 1)


def test_a_missing_file_is_none_of_its_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_archive(tmp_path / "none", KIND)
    with pytest.raises(IsADirectoryError):
        read_archive(tmp_path, KIND)


ROW = ["w", "<f4", [2]]
LIES: dict[str, Any] = {
    "facts are a list": {"facts": []}, "no facts": {"facts": None}, "no table": {"arrays": None},
    "a row is a number": {"arrays": [3]}, "a row is null": {"arrays": [None]},
    "a row is short": {"arrays": [ROW[:2]]}, "a row is long": {"arrays": [[*ROW, 1]]},
    "a name is a list": {"arrays": [[[], "<f4", [2]]]}, "twice": {"arrays": [ROW, ROW]},
    "objects": {"arrays": [["w", "|O", [1]]]}, "records": {"arrays": [["w", "<f4,<f4", [1]]]},
    "no text": {"arrays": [["w", "<U0", [10**12]]]}, "void": {"arrays": [["w", "|V8", [1]]]},
    "times": {"arrays": [["w", "<M8[s]", [1]]]}, "a type is a number": {"arrays": [["w", 4, [2]]]},
    "half an integer": {"arrays": [["w", "<i3", [2]]]}, "a shape": {"arrays": [["w", "<f4", 2]]},
    "a side is a fraction": {"arrays": [["w", "<f4", [2.0]]]},
    "a side is true": {"arrays": [["w", "<f8", [True]]]},
    "a side is negative": {"arrays": [["w", "<f4", [-1, -2]]]},
    "a side is huge": {"arrays": [["w", "<f4", [10**30]]]},
    "axes without end": {"arrays": [["w", "<f4", [1] * 999 + [2]]]},
    "more than there is": {"arrays": [["w", "<f4", [2**40]]]},
    "nothing of too much": {"arrays": [["w", "<f4", [2]], ["e", "<f4", [0, 2**47, 2**47]]]},
    "less than there is": {"arrays": []}, "kind is a list": {"kind": ["test"]},
    "version is true": {"version": True}, "version is a text": {"version": "2"},
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_text_is_one_error_and_takes_no_memory(lie: str, tmp_path: Path) -> None:
    head = {"kind": "test", "version": 2, "facts": {}, "arrays": [ROW]}
    (tmp_path / "a").write_bytes(sealed(json.dumps(head | LIES[lie]).encode(), bytes(8)))
    tracemalloc.start()
    try:
        refused(tmp_path / "a")
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()
    (tmp_path / "a").write_bytes(sealed(json.dumps(head).encode(), bytes(8)))
    assert read_archive(tmp_path / "a", KIND).arrays["w"].tolist() == [0, 0]


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"3", b"[]", b"null", b"{}", b"\xff", b"[" * 200_000, b'{"a":' * 200_000],
    ids=["nothing", "brace", "number", "list", "null", "empty", "no text", "deep", "deep object"],
)
def test_a_text_that_is_none_is_one_error(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(sealed(text))
    refused(tmp_path / "a")


@pytest.mark.parametrize("length", [10**6, 2**32 - 1])
def test_a_text_longer_than_the_file_is_one_error(length: int, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(sealed(b"{}", length=length))
    assert "is said to take" in refused(tmp_path / "a")


def test_random_texts_are_archives_or_one_error(path: Path) -> None:
    good = json.dumps(text_of(path)).encode()
    numbers = b"".join(array.tobytes() for array in SMALL.values())
    for seed in range(2000):
        draw, data = random.Random(seed), bytearray(good)
        for _ in range(draw.randrange(1, 4)):
            data[draw.randrange(len(data))] = draw.choice(b'0123456789"[]{},:-ft<|\\ \xff')
        path.write_bytes(sealed(bytes(data), numbers))
        try:
            read_archive(path, KIND)
        except ArchiveError as error:
            assert "\n" not in str(error)


def test_what_cannot_be_kept_is_refused_and_the_old_file_stays(path: Path) -> None:
    before = path.read_bytes()
    for array in (np.array([{}], object), np.array(["2020"], "M8[D]"), np.zeros(2, "f4,f4")):
        with pytest.raises(ArchiveError, match="array 'x' has type"):
            write_archive(path, KIND, {}, {"x": array})
    with pytest.raises(ArchiveError, match="at most"):
        write_archive(path, KIND, {"long": "x" * 2**26})
    assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]


def test_it_has_the_permissions_that_are_asked_for(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_archive(tmp_path / "mine", KIND, {})
        write_archive(tmp_path / "any", KIND, {}, mode=None)
    finally:
        os.umask(before)
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("mine", "any")]
    assert modes == [0o600, 0o640]


def test_reading_and_writing_take_little_more_memory_than_the_arrays(tmp_path: Path) -> None:
    big = {"w": np.ones(2**22, np.float32)}
    tracemalloc.start()
    try:
        write_archive(tmp_path / "a", KIND, {}, big)
        assert tracemalloc.get_traced_memory()[1] < 2**23 + big["w"].nbytes
        tracemalloc.reset_peak()
        read_archive(tmp_path / "a", KIND)
        assert tracemalloc.get_traced_memory()[1] < 2**23 + 2 * big["w"].nbytes
    finally:
        tracemalloc.stop()


WRITER = """
import itertools, sys
import numpy as np
from fl_elastic.state.archive import Kind, write_archive
for number in itertools.count():
    write_archive(sys.argv[1], Kind("test", 2), {"n": number}, {"x": np.full(50_000, number)})
    print(number, flush=True)
"""


def test_whoever_is_killed_leaves_the_old_archive_or_the_new(tmp_path: Path) -> None:
    path, draw = tmp_path / "archive", random.Random(0)
    for _ in range(5):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        for _ in range(draw.randrange(1, 40)):
            said = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        rest = writer.communicate()[0].split()
        found = read_archive(path, KIND)
        number = found.facts["n"]
        # At most one was on its way when it was killed.
        assert int(rest[-1] if rest else said) <= number <= int(rest[-1] if rest else said) + 1
        assert (found.arrays["x"] == number).all()
