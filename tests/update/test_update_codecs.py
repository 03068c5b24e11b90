"""Each codec against a slow obvious reference, and what the conformance checks catch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from fl_elastic.errors import UpdateError
from fl_elastic.testing import codec_checks
from fl_elastic.update import CODECS, Codec, Manifest, PartialUpdate, decode, encode
from fl_elastic.update.codecs.base import Fp16, Fp32
from fl_elastic.update.codecs.bf16 import Bf16
from fl_elastic.update.codecs.int8 import Int8
from fl_elastic.update.codecs.topk import TopK
from fl_elastic.update.manifest import Role

Floats = NDArray[np.float32]
any_float = st.floats(-(2.0**100), 2.0**100, width=32)
shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
any_array = hnp.arrays(np.float32, shapes, elements=any_float)


def written(codec: Codec, values: Floats, seed: int = 0) -> bytes:
    return codec.encode(values, np.random.default_rng(seed))


def through(codec: Codec, values: Floats, seed: int = 0) -> Floats:
    return codec.decode(memoryview(written(codec, values, seed)), values.shape)


def test_what_each_codec_is_for() -> None:
    made = {name: CODECS.make(name) for name in CODECS.names()}
    assert {name for name, codec in made.items() if not codec.lossy} == {"fp32"}
    assert {name for name, codec in made.items() if codec.unbiased} == {"fp32", "int8"}
    assert {name for name, codec in made.items() if codec.for_weights} == {"fp32", "fp16", "bf16"}
    assert {name for name, codec in made.items() if codec.for_statistics} == {
        "fp32", "fp16", "bf16"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("codec", "sizes"),
    [
        ("fp32", [4, 0, 400, 2304, 262_148]),
        ("fp16", [2, 0, 200, 1152, 131_074]),
        ("bf16", [2, 0, 200, 1152, 131_074]),
        ("int8", [5, 0, 104, 580, 65_541]),
        ("topk", [8, 0, 4 + 6 * 4, 4 + 36 * 4, 4 + 4096 * 6]),
    ],
)
def test_the_bytes_of_each_shape(codec: str, sizes: list[int]) -> None:
    of = [(), (3, 0, 2), (100,), (8, 8, 3, 3), (65_537,)]
    assert [CODECS.make(codec).size(shape) for shape in of] == sizes


@given(values=any_array)
def test_bf16_is_what_torch_makes_of_it(values: Floats) -> None:
    expected = torch.tensor(values).to(torch.bfloat16)
    assert written(Bf16(), values) == expected.view(torch.int16).numpy().astype("<i2").tobytes()
    assert np.array_equal(through(Bf16(), values), expected.float().numpy())


def test_bf16_rounds_ties_to_even() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0xBF808000, 0x3F808001, 0x00000001], np.uint32)
    words = np.frombuffer(written(Bf16(), bits.view(np.float32)), "<u2")
    assert [hex(word) for word in words] == ["0x3f80", "0x3f82", "0xbf80", "0x3f81", "0x0"]


@pytest.mark.parametrize("sign", [1, -1])
def test_what_rounds_to_infinity_is_refused(sign: int) -> None:
    largest = np.array([sign * np.finfo(np.float32).max], np.float32)
    with pytest.raises(UpdateError, match="do not fit bfloat16"):
        written(Bf16(), largest)
    with pytest.raises(UpdateError, match="do not fit int8"):
        written(Int8(), largest)
    assert through(Bf16(), np.array([sign * 3.3895e38], np.float32))[0] * sign > 3.3e38


@given(values=any_array, seed=st.integers(0, 99))
def test_int8_is_a_neighbouring_multiple_of_the_scale(values: Floats, seed: int) -> None:
    data = written(Int8(), values, seed)
    if not values.size:
        assert data == b""
        return
    scale = float(np.frombuffer(data[:4], "<f4")[0])
    multiples = np.frombuffer(data[4:], np.int8).astype(np.float64).reshape(values.shape)
    largest = float(np.abs(values).max())
    assert largest <= 127 * scale <= largest * (1 + 2.0**-22) + 127 * 2.0**-149
    assert np.abs(multiples).max() <= 127
    assert (np.abs(multiples * scale - values) <= scale * (1 + 1e-6)).all()
    assert (multiples[values == 0] == 0).all()


def test_int8_keeps_multiples_of_the_scale_exactly() -> None:
    values = np.arange(-127, 128, dtype=np.float32) * 2.0**-9
    for seed in range(20):
        assert np.array_equal(through(Int8(), values, seed), values)


def test_int8_rounds_each_number_up_as_often_as_it_should() -> None:
    shares = np.array([0.0, 0.1, 0.5, 0.9, -0.1, -0.75], np.float32)
    values = np.concatenate([np.full(1, 127, np.float32), np.repeat(shares, 20_000)])
    read = through(Int8(), values)
    assert read[0] == 127
    means = read[1:].reshape(len(shares), -1).mean(axis=1)
    assert np.abs(means - shares).max() < 5 * 0.5 / 20_000**0.5
    assert means[0] == 0


@given(values=any_array, digits=st.integers(0, 1))
def test_topk_keeps_the_largest_sixteenth(values: Floats, digits: int) -> None:
    if digits:
        # Many equal magnitudes: the first of them are kept.
        values = np.sign(values)
    flat = [float(number) for number in values.reshape(-1)]
    count = max(1, len(flat) // 16)
    kept = sorted(range(len(flat)), key=lambda i: (-abs(flat[i]), i))[:count]
    back = through(TopK(), values).reshape(-1)
    largest = max((abs(number) for number in flat), default=0.0)
    for index, number in enumerate(flat):
        if index in kept:
            assert abs(back[index] - number) <= 2.0**-11 * abs(number) * 1.01 + largest * 2.0**-25
        else:
            assert back[index] == 0


@pytest.mark.parametrize("count", [65_536, 65_537])
def test_topk_indices_are_as_wide_as_needed(count: int) -> None:
    values = np.zeros(count, np.float32)
    values[-1], values[7] = 3.0, -1.5
    data = written(TopK(), values)
    assert len(data) == 4 + 4096 * (4 if count == 65_536 else 6)
    assert np.array_equal(through(TopK(), values), values)


def topk_bytes(indices: list[int], shares: list[float], scale: float = 2.0) -> memoryview:
    data = np.array(scale, "<f4").tobytes() + np.array(shares, "<f2").tobytes()
    return memoryview(data + np.array(indices, "<u2").tobytes())


def test_topk_refuses_what_it_does_not_write() -> None:
    shape = (5, 7)
    back = TopK().decode(topk_bytes([3, 34], [0.5, -1.0]), shape)
    assert back[0, 3] == 1 and back[4, 6] == -2 and np.count_nonzero(back) == 2
    for indices in ([3, 35], [34, 3], [3, 3], [65_535, 0], [0, 65_535]):
        with pytest.raises(UpdateError, match="indices"):
            TopK().decode(topk_bytes(indices, [0.5, -1.0]), shape)
    for shares in ([0.5, 1.5], [np.nan, 0.5], [-np.inf, 0.5]):
        with pytest.raises(UpdateError, match="share"):
            TopK().decode(topk_bytes([3, 34], shares), shape)
    for scale in (-1.0, np.nan, np.inf):
        with pytest.raises(UpdateError, match="scale"):
            TopK().decode(topk_bytes([3, 34], [0.5, -1.0], scale), shape)


def test_int8_refuses_what_it_does_not_write() -> None:
    for scale, code, what in [
        (np.nan, 1, "scale"), (np.inf, 1, "scale"), (-1.0, 1, "scale"), (3e38, 1, "scale"),
        (1.0, -128, "-128"),
    ]:  # fmt: skip
        data = np.array(scale, "<f4").tobytes() + np.array([0, code], np.int8).tobytes()
        with pytest.raises(UpdateError, match=what):
            Int8().decode(memoryview(data), (2,))


class NearestInt8(Int8):
    """Claims to be unbiased, and rounds to nearest."""

    def encode(self, values: Floats, generator: np.random.Generator) -> bytes:
        data = super().encode(values, generator)
        if not data:
            return data
        scale = np.frombuffer(data[:4], "<f4")[0]
        nearest = np.round(values.reshape(-1) / (scale or 1)).astype(np.int8)
        return data[:4] + nearest.tobytes()


class OwnRandomness(Int8):
    """Rounds by a generator of its own."""

    generator = np.random.default_rng(1)

    def encode(self, values: Floats, generator: np.random.Generator) -> bytes:
        return super().encode(values, self.generator)


class WrongSize(Fp32):
    """Promises fewer bytes."""

    def size(self, shape: tuple[int, ...]) -> int:
        return super().size(shape) - 1


class TooProud(Fp16):
    """Claims to be exact."""

    lossy = False


class OffByAFactor(Fp16):
    """Reads twice what was written."""

    def decode(self, data: memoryview, shape: tuple[int, ...]) -> Floats:
        return super().decode(data, shape) * np.float32(2.5)


class Shared(Fp32):
    """Returns a view of the message."""

    def decode(self, data: memoryview, shape: tuple[int, ...]) -> Floats:
        return np.frombuffer(data, dtype="<f4").reshape(shape)


class Flat(Fp32):
    """Forgets the shape."""

    def decode(self, data: memoryview, shape: tuple[int, ...]) -> Floats:
        return super().decode(data, shape).reshape(-1)


class Crash(TopK):
    """Raises other errors on damaged indices."""

    def decode(self, data: memoryview, shape: tuple[int, ...]) -> Floats:
        try:
            return super().decode(data, shape)
        except UpdateError:
            raise IndexError from None


class TakesNaN(Fp32):
    """Writes what is not finite."""

    def encode(self, values: Floats, generator: np.random.Generator) -> bytes:
        return values.astype("<f4").tobytes()


BROKEN: dict[type[Codec], str] = {
    NearestInt8: "check_unbiased_mean_is_the_value",
    OwnRandomness: "check_same_generator_gives_same_bytes",
    WrongSize: "check_size_is_exact",
    TooProud: "check_lossless_is_exact",
    OffByAFactor: "check_round_trip",
    Shared: "check_result_owns_its_memory",
    Flat: "check_empty",
    Crash: "check_any_bytes_are_read_or_refused",
    TakesNaN: "check_not_finite_is_refused",
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_the_checks_catch_a_broken_codec(broken: type[Codec]) -> None:
    failed = []
    for check in codec_checks():
        try:
            check(broken)
        except AssertionError:
            failed.append(getattr(check, "__name__", ""))
    assert BROKEN[broken] in failed


@pytest.mark.parametrize("codec", CODECS.names())
@given(data=st.data(), shape=shapes)
def test_any_bytes_of_the_right_length_are_a_tensor_or_refused(
    codec: str, data: Any, shape: tuple[int, ...]
) -> None:
    made = CODECS.make(codec)
    size = made.size(shape)
    try:
        back = made.decode(memoryview(data.draw(st.binary(min_size=size, max_size=size))), shape)
    except UpdateError as error:
        assert "\n" not in str(error)
    else:
        assert back.shape == shape and back.dtype == np.float32


@pytest.mark.parametrize("clients", [10, 100])
def test_the_errors_of_many_clients_cancel(clients: int) -> None:
    """Clients of equally many examples, as in any fleet of equal shares, are rounded independently."""
    size = 4000
    manifest = Manifest(("w",), ((size,),), ("float32",), (Role.PARAMETER,))
    rng = np.random.default_rng(0)
    true = rng.normal(size=size)
    sent = []
    for _ in range(clients):
        # What clients learnt differs by little, as it does where they learn the same.
        own = (true + 1e-4 * rng.normal(size=size)).astype(np.float32)
        update = PartialUpdate({"w": own}, {"w": 5}, num_examples=100, base_version=3)
        sent.append(decode(encode(update, manifest, "int8"), manifest).deltas["w"] - own)
    one = float(np.sqrt(np.mean(sent[0] ** 2)))
    mean = float(np.sqrt(np.mean(np.mean(sent, axis=0) ** 2)))
    assert mean < 1.3 * one / np.sqrt(clients)


def test_the_same_update_gives_the_same_bytes_and_another_round_others() -> None:
    manifest = Manifest(("w",), ((500,),), ("float32",), (Role.PARAMETER,))
    delta = np.random.default_rng(1).normal(size=500).astype(np.float32)

    def packed(version: int) -> bytes:
        update = PartialUpdate({"w": delta}, {"w": 5}, num_examples=100, base_version=version)
        return decode(encode(update, manifest, "int8"), manifest).deltas["w"].tobytes()

    assert packed(3) == packed(3)
    assert packed(3) != packed(4)
