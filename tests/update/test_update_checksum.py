"""The checksum of packed messages: what damage it notices in long messages, against a slow reference."""

from __future__ import annotations

import struct
from hashlib import blake2b

import numpy as np
import pytest
from damage import assert_damage_is_noticed, flipped
from hypothesis import given
from hypothesis import strategies as st

from fl_elastic.update import Manifest, PartialUpdate, decode, encode
from fl_elastic.update.frame import CHECKSUM_BYTES, ROW_BYTES, checksum
from fl_elastic.update.manifest import Role

HEAD = b"head"
ROWS = 40
LONG = np.random.default_rng(0).bytes(ROWS * ROW_BYTES + 77)


def slow_checksum(head: bytes, numbers: bytes) -> bytes:
    """By the documentation, with Python's own integers."""
    whole = len(numbers) // ROW_BYTES
    width = ROW_BYTES // 8
    words = struct.unpack(f"<{whole * width}Q", numbers[: whole * ROW_BYTES])
    rows = [sum(words[row * width : (row + 1) * width]) % 2**64 for row in range(whole)]
    columns = [sum(words[column::width]) % 2**64 for column in range(width)] if whole else []
    digest = blake2b(head + struct.pack("<Q", len(numbers)), digest_size=CHECKSUM_BYTES)
    digest.update(struct.pack(f"<{len(rows)}Q", *rows))
    digest.update(struct.pack(f"<{len(columns)}Q", *columns))
    digest.update(numbers[whole * ROW_BYTES :])
    return digest.digest()


@pytest.mark.parametrize("length", [0, 1, 7, ROW_BYTES - 1, ROW_BYTES, ROW_BYTES + 1, len(LONG)])
def test_it_is_the_documented_one(length: int) -> None:
    assert checksum(HEAD, LONG[:length]) == slow_checksum(HEAD, LONG[:length])


def test_it_does_not_depend_on_where_in_memory_the_numbers_lie() -> None:
    expected = checksum(HEAD, LONG)
    for offset in range(9):
        shifted = memoryview(b"x" * offset + LONG)[offset:]
        assert checksum(HEAD, shifted) == expected


@pytest.mark.parametrize(
    "numbers", [LONG, bytes(len(LONG)), b"\xff" * len(LONG)], ids=["random", "zeros", "ones"]
)
def test_flipped_bits_of_long_messages_are_noticed(numbers: bytes) -> None:
    # Every bit of the first words, the last words and around a row's end, and some of each row.
    edges = [*range(256), *range(8 * ROW_BYTES - 256, 8 * ROW_BYTES + 256)]
    edges += range(8 * len(numbers) - 1024, 8 * len(numbers))
    within = np.random.default_rng(1).integers(0, 8 * len(numbers), 500).tolist()
    expected = checksum(HEAD, numbers)
    for position in edges + within:
        assert checksum(HEAD, flipped(numbers, position)) != expected, position


@given(
    words=st.lists(
        st.tuples(
            st.integers(0, ROWS * ROW_BYTES // 8 - 1),
            st.one_of(st.integers(1, 2**64 - 1), st.integers(0, 63).map(lambda bit: 1 << bit)),
        ),
        min_size=1,
        max_size=3,
        unique_by=lambda each: each[0],
    ),
    constant=st.booleans(),
)
def test_any_damage_to_three_words_is_noticed(words: list[tuple[int, int]], constant: bool) -> None:
    good = bytes(len(LONG)) if constant else LONG
    data = bytearray(good)
    for place, change in words:
        old = int.from_bytes(data[8 * place : 8 * place + 8], "little")
        data[8 * place : 8 * place + 8] = (old ^ change).to_bytes(8, "little")
    assert checksum(HEAD, bytes(data)) != checksum(HEAD, good)


@given(
    start=st.integers(0, len(LONG) - 1),
    length=st.integers(1, ROW_BYTES - 8),
    value=st.sampled_from([0, 0xFF, 0x3F, 0x80]),
    old=st.sampled_from([None, 0, 0xFF, 0x80]),
)
def test_overwriting_less_than_a_row_is_noticed(
    start: int, length: int, value: int, old: int | None
) -> None:
    good = LONG if old is None else bytes([old]) * len(LONG)
    stop = min(start + length, len(good))
    bad = good[:start] + bytes([value]) * (stop - start) + good[stop:]
    assert (checksum(HEAD, bad) != checksum(HEAD, good)) == (bad != good)


@pytest.mark.parametrize("rows", [1, 2, 8, 16, 32])
@pytest.mark.parametrize("before, after", [(0x00, 0xFF), (0x3F, 0x00), (0x80, 0x00)])
def test_whole_rows_of_one_constant_written_over_another_are_noticed(
    rows: int, before: int, after: int
) -> None:
    good = bytes([before]) * len(LONG)
    stop = (2 + rows) * ROW_BYTES
    bad = good[: 2 * ROW_BYTES] + bytes([after]) * (rows * ROW_BYTES) + good[stop:]
    assert checksum(HEAD, bad) != checksum(HEAD, good)


@pytest.mark.parametrize("size", [1, 4, 8, 512, 4096, ROW_BYTES, 3 * ROW_BYTES])
def test_swapped_and_moved_blocks_are_noticed(size: int) -> None:
    expected = checksum(HEAD, LONG)
    for first, second in ((0, size), (0, 5 * ROW_BYTES), (ROW_BYTES, 20 * ROW_BYTES + 8)):
        a, b = slice(first, first + size), slice(second, second + size)
        data = bytearray(LONG)
        data[a], data[b] = LONG[b], LONG[a]
        assert checksum(HEAD, bytes(data)) != expected
    assert checksum(HEAD, LONG[size:] + LONG[:size]) != expected
    assert checksum(HEAD, LONG[:size] + LONG[: len(LONG) - size]) != expected


def test_every_length_around_a_row_is_another_message() -> None:
    zeros = bytes(3 * ROW_BYTES)
    lengths = [*range(40), *range(ROW_BYTES - 20, ROW_BYTES + 20), 2 * ROW_BYTES, len(zeros)]
    assert len({checksum(HEAD, zeros[:length]) for length in lengths}) == len(lengths)
    assert checksum(HEAD + b"\0", b"") != checksum(HEAD, b"\0")


MANIFEST = Manifest(("w",), ((90_000,),), ("float32",), (Role.PARAMETER,))


@pytest.mark.parametrize("codec", ["fp32", "fp16", "int8"])
def test_damage_to_a_long_update_is_an_update_error(codec: str) -> None:
    rng = np.random.default_rng(3)
    delta = rng.standard_normal(90_000).astype(np.float32)
    good = encode(PartialUpdate({"w": delta}, {"w": 1}, 1), MANIFEST, codec)
    assert_damage_is_noticed(
        good, lambda data: decode(data, MANIFEST),
        rng.integers(0, 8 * len(good), 300).tolist(), rng.integers(0, len(good), 50).tolist(),
    )  # fmt: skip


def test_the_highest_bit_of_every_word_of_two_rows_is_noticed() -> None:
    # In rows of an even number of words these changes would add up to nothing, along rows and columns.
    negative_zeros = np.full(2 * ROW_BYTES // 8, 1 << 63, "<u8").tobytes()
    bad = negative_zeros + bytes(len(LONG) - len(negative_zeros))
    assert checksum(HEAD, bad) != checksum(HEAD, bytes(len(LONG)))


@pytest.mark.parametrize("count, aligned", [(1023, False), (1024, True), (90_000, True)])
def test_long_payloads_begin_where_words_do(count: int, aligned: bool) -> None:
    for length in range(1, 20):
        manifest = Manifest(("w" * length,), ((count,),), ("float32",), (Role.PARAMETER,))
        delta = np.random.default_rng(4).standard_normal(count).astype(np.float32)
        # The number of steps changes the length of the header.
        update = PartialUpdate({"w" * length: delta}, {"w" * length: 10 ** (length % 6)}, 1)
        data = encode(update, manifest)
        start = data.index(delta.tobytes())
        assert (start % 64 == 0) if aligned else data[start - 1 : start] == b"}"
        assert np.array_equal(decode(data, manifest).deltas["w" * length], delta)
