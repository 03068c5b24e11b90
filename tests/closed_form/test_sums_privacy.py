"""Noise on sums: how much is needed, where it is, and what head comes of it."""

from __future__ import annotations

import json
from math import exp, sqrt
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.integrate import quad  # type: ignore[import-untyped]
from scipy.stats import norm  # type: ignore[import-untyped]
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from slow_ones import slow_unless
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from fl_elastic.closed_form.folds import Fold
from fl_elastic.closed_form.head import closed_form_head
from fl_elastic.closed_form.head_sums import HeadSums
from fl_elastic.closed_form.secret_sums import FixedPoint, as_vector, of_vector, with_held_out
from fl_elastic.closed_form.sums_privacy import (
    SumsPrivacy,
    decode_noisy_sums,
    encode_noisy_sums,
    gaussian_delta,
    noised,
    private_head,
)
from fl_elastic.errors import SettingError, TrainingError, UpdateError
from fl_elastic.training.head_pass import sums_apart
from fl_elastic.update import Manifest
from fl_elastic.update.frame import MessageKind, pack

Floats = NDArray[np.float64]


def integrated_delta(epsilon: float, noise: float) -> float:
    """How much more of the one distribution lies anywhere than exp(epsilon) of the other, by integration."""

    def more(x: float) -> float:
        return max(norm.pdf(x, 1.0, noise) - exp(epsilon) * norm.pdf(x, 0.0, noise), 0.0)

    # Above this the first is the larger.
    edge = epsilon * noise**2 + 0.5
    return float(quad(more, edge, edge + 40 * noise, epsabs=1e-13, limit=400)[0])


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("noise", [0.3, 1.0, 4.0, 20.0])
def test_delta_is_that_of_numeric_integration(epsilon: float, noise: float) -> None:
    assert gaussian_delta(epsilon, noise) == pytest.approx(
        integrated_delta(epsilon, noise), rel=1e-6, abs=1e-11
    )


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0, 100.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-8])
def test_noise_is_the_least_that_keeps_the_promise(epsilon: float, delta: float) -> None:
    noise = SumsPrivacy(epsilon=epsilon, delta=delta, clip=1.0).noise / sqrt(12)
    assert gaussian_delta(epsilon, noise) <= delta * (1 + 1e-6)
    assert gaussian_delta(epsilon, 0.999 * noise) > delta
    # The classical bound needs more for an epsilon below 1.
    if epsilon < 1:
        assert noise < sqrt(2 * np.log(1.25 / delta)) / epsilon


def sums_of(x: Floats, y: Floats) -> HeadSums:
    return HeadSums.of_folds(
        "weight", [Fold.of(x, y)], x.shape[1], y.shape[1], True
    ).without_folds()


@pytest.mark.parametrize("seed", range(20))
def test_one_example_moves_the_sums_by_no_more_than_the_length(seed: int) -> None:
    """In the norm in which the noise is of one size: symmetric products, and targets times two."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(6, 4))
    x /= np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1.0 if seed % 2 else 0.0)
    y = np.eye(3)[rng.integers(0, 3, 6)]
    before, after = sums_of(x[1:], y[1:]), sums_of(x, y)
    moved = (after.products - before.products) ** 2
    length = sqrt(moved.sum() + 4 * ((after.targets - before.targets) ** 2).sum())
    assert length <= sqrt(12) + 1e-9
    # What it is for a feature vector as long as the clip.
    if not seed % 2:
        assert length == pytest.approx(sqrt(12))


@pytest.mark.parametrize("times", [1, 2, 7])
def test_an_example_that_comes_again_moves_the_sums_no_further(times: int) -> None:
    """As of a data set in which some files are listed twice, or an epoch that is several passes."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(12, 4), torch.arange(12) % 3
    model = nn.Linear(4, 3)
    rest = [(inputs[1:], targets[1:])]
    again = [(inputs[:1], targets[:1])] * times
    before, _ = sums_apart(model, rest, clip=0.1)
    after, _ = sums_apart(model, [*again, *rest, *again], clip=0.1)
    moved = ((after.products - before.products) ** 2).sum()
    moved += 4 * ((after.targets - before.targets) ** 2).sum()
    assert sqrt(moved) == pytest.approx(sqrt(12))
    # Of another class it is another example.
    other, _ = sums_apart(model, [*again, *rest, (inputs[:1], targets[:1] + 1)], clip=0.1)
    assert other.num_examples == 13


@pytest.mark.parametrize("replacement", [True, False])
def test_an_example_that_may_be_drawn_many_times_has_no_known_length(replacement: bool) -> None:
    data = TensorDataset(torch.randn(12, 4), torch.arange(12) % 3)
    drawn = WeightedRandomSampler([1.0] * 12, 12, replacement=replacement)
    loader = DataLoader(data, 4, sampler=drawn)
    if replacement:
        with pytest.raises(TrainingError, match="with replacement"):
            sums_apart(nn.Linear(4, 3), loader, clip=1.0)
    else:
        assert sums_apart(nn.Linear(4, 3), loader, clip=1.0)[0].num_examples == 12
    assert sums_apart(nn.Linear(4, 3), loader)[0].num_examples == 12


def test_noise_is_as_large_as_said_everywhere_and_symmetric() -> None:
    sums, rng = sums_of(np.zeros((1, 6)), np.eye(3)[[0]]), np.random.default_rng(0)
    draws = [noised(sums, 2.0, rng) for _ in range(4000)]
    products = np.array([each.products - sums.products for each in draws])
    targets = np.array([each.targets - sums.targets for each in draws])
    assert np.array_equal(products, products.transpose(0, 2, 1))
    spread = products.std(axis=0)
    assert np.abs(np.diag(spread) - 2.0).max() < 0.12
    off = spread[np.triu_indices(7, 1)]
    assert np.abs(off - 2.0 / sqrt(2)).max() < 0.1
    assert np.abs(targets.std(axis=0) - 1.0).max() < 0.06
    assert np.abs(products.mean(axis=0)).max() < 0.15
    # The count of a class is released once.
    assert all(np.array_equal(each.squares, each.targets[-1]) for each in draws[:9])


def clipped(x: Floats, clip: float) -> Floats:
    return np.asarray(x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), clip))


def digits() -> tuple[Floats, Floats, Floats, Floats]:
    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    x, y = found.data[order] / 16, found.target[order]
    return x[:1400], y[:1400], x[1400:], y[1400:]


CLIP = 4.0


def test_without_noise_it_is_ridge_regression() -> None:
    x, y, _, _ = digits()
    goals = np.eye(10)[y]
    sums = sums_of(clipped(x, CLIP), goals)
    head = private_head(sums, 0.01, CLIP)
    rows = clipped(x, CLIP)
    ridge = 0.5 * 0.01 * sqrt(2 * 65)
    centred = rows - rows.mean(axis=0)
    weight = np.linalg.solve(
        centred.T @ centred + ridge * np.eye(64), centred.T @ (goals - goals.mean(axis=0))
    )
    scores = rows @ weight
    found = rows * CLIP @ head.weight.T
    assert np.corrcoef(found.ravel(), scores.ravel())[0, 1] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("intercept", [True, False])
def test_noise_larger_than_everything_gives_a_finite_head(intercept: bool) -> None:
    sums = noised(sums_of(np.ones((2, 5)) / 3, np.eye(3)[[0, 1]]), 1e4, np.random.default_rng(1))
    head = private_head(sums, 1e4, 2.0, intercept=intercept)
    assert np.isfinite(head.weight).all() and np.isfinite(head.bias).all()


MANIFEST = Manifest.of(nn.Linear(6, 3))


def noisy(seed: int, factor: float = 1.0, noise: float = 2.0) -> HeadSums:
    rng = np.random.default_rng(seed)
    x = factor * clipped(rng.normal(size=(40, 6)), 1.0)
    return noised(sums_of(x, np.eye(3)[rng.integers(0, 3, 40)]), noise, rng)


@pytest.mark.parametrize("seed", slow_unless(lambda seed: seed < 20, range(50)))
def test_noisy_sums_of_clipped_examples_come_back_from_the_wire(seed: int) -> None:
    sums = noisy(seed)
    back = decode_noisy_sums(encode_noisy_sums(sums, MANIFEST), MANIFEST, 2.0)
    np.testing.assert_allclose(back.products, sums.products, rtol=1e-6)
    np.testing.assert_allclose(back.targets, sums.targets, rtol=1e-6)
    np.testing.assert_allclose(back.squares, sums.squares, rtol=1e-6)
    assert back.classes and back.weight == "weight"


def lie(change: Any) -> HeadSums:
    sums = noisy(0)
    change(sums)
    return sums


def negative(sums: HeadSums) -> None:
    sums.products[0, 0] -= 80.0


def crowded(sums: HeadSums) -> None:
    sums.targets[-1] += 60.0


@pytest.mark.parametrize(
    ("sums", "said"),
    [
        (noisy(0, factor=4.0), "longer than the clip"),
        (lie(negative), "larger than their squares"),
        (lie(crowded), "each example in one class"),
    ],
)
def test_what_no_noise_makes_of_clipped_examples_is_refused(sums: HeadSums, said: str) -> None:
    with pytest.raises(UpdateError, match=said):
        decode_noisy_sums(encode_noisy_sums(sums, MANIFEST), MANIFEST, 2.0)


@pytest.mark.parametrize("seed", slow_unless(lambda seed: seed < 30, range(100)))
def test_mutated_messages_raise_update_errors_alone(seed: int) -> None:
    packed, draw = bytearray(encode_noisy_sums(noisy(1), MANIFEST)), np.random.default_rng(seed)
    for _ in range(int(draw.integers(1, 4))):
        packed[int(draw.integers(len(packed)))] ^= int(draw.integers(1, 256))
    with pytest.raises(UpdateError):
        decode_noisy_sums(bytes(packed[: int(draw.integers(10, len(packed) + 1))]), MANIFEST, 2.0)


@pytest.mark.parametrize(
    ("header", "payload"),
    [
        ({"indices": []}, b""),
        ({"indices": [0]}, b"abc"),
        ({"indices": [0]}, b"\0" * 400),
        ({"indices": [1]}, b"\0" * 196),
        ({"indices": [0]}, b"\xff" * 196),
        ({}, b""),
    ],
)
def test_frames_that_hold_something_else_are_refused(header: Any, payload: bytes) -> None:
    message = pack(MessageKind.NOISY_SUMS, {"manifest": MANIFEST.hash, **header}, [payload])
    with pytest.raises(UpdateError):
        decode_noisy_sums(message, MANIFEST, 2.0)


@pytest.mark.parametrize(
    "given", [{"epsilon": 0.0}, {"epsilon": 1e3}, {"delta": 0.0}, {"delta": 1.0}, {"clip": 0.0},
              {"clip": float("inf")}, {"epsilon": float("nan")}],
)  # fmt: skip
def test_privacy_that_means_nothing_is_refused(given: dict[str, float]) -> None:
    with pytest.raises(SettingError, match="must be"):
        SumsPrivacy(**({"epsilon": 1.0, "clip": 1.0} | given))


def test_numbers_have_no_known_length() -> None:
    sums = HeadSums.of_folds("weight", [Fold.of(np.ones((2, 2)), np.ones((2, 1)))], 2, 1, False)
    with pytest.raises(UpdateError, match="numeric targets have no bounded length"):
        noised(sums, 1.0, np.random.default_rng(0))


@pytest.mark.parametrize("steps", [2**22, 2**28, 3_000_000, 2**16])
@pytest.mark.parametrize("clients", [1, 7, 300])
def test_fixed_point_adds_up_exactly(steps: int, clients: int) -> None:
    fixed, rng = FixedPoint(steps, 8.0, 1000.0), np.random.default_rng(steps % 97)
    numbers = rng.normal(size=(clients, 9)) * 10.0 ** rng.uniform(-6, 7, 9)
    expected = np.rint(numbers * 2.0**27).astype(object).sum(axis=0)
    # What the workflow does, with its random rounding, and a mean by weights.
    digits = []
    for each in numbers:
        scaled = (np.clip(fixed.write(each) * fixed.share, -8, 8) + 8) * (steps / 16)
        up = np.ceil(scaled).astype(np.int64)
        digits.append(up - (rng.random(up.shape) < up - scaled))
    total = np.sum(digits, axis=0)
    assert total.max() < steps * clients
    mean = (total * (16 / steps) - 8 * clients) / (fixed.share * clients)
    found = fixed.read(mean, clients)
    np.testing.assert_array_equal(found, expected.astype(np.float64) * 2.0**-27)


def test_numbers_too_large_for_it_are_refused() -> None:
    with pytest.raises(UpdateError, match="do not fit secure aggregation"):
        FixedPoint(2**22, 8.0, 1000.0).write(np.array([1.0, 3e8]))
    with pytest.raises(UpdateError, match="do not fit secure aggregation"):
        FixedPoint(2**22, 8.0, 1000.0).write(np.array([np.nan]))
    nothing, coarse = (
        json.dumps({"steps": n, "clip": c, "weight": 1}) for n, c in ((4096, 0), (8, 1))
    )
    for text in ("", "{}", "[1]", nothing, coarse):
        with pytest.raises(UpdateError):
            FixedPoint.of_text(text)


@pytest.mark.parametrize("count", [3, 40])
def test_what_is_held_out_of_a_total_is_what_it_was(count: int) -> None:
    rng = np.random.default_rng(count)
    units = 10.0 ** np.linspace(-4, 4, 12)
    x, y = (rng.normal(size=(60, 12)) + 3) * units, np.eye(4)[rng.integers(0, 4, 60)]
    total, held = sums_of(x, y), sums_of(x[:count], y[:count])
    found = with_held_out(
        of_vector(as_vector(total), "weight", (4, 12), True),
        of_vector(as_vector(held), "weight", (4, 12), True),
    )
    (fold,) = found.folds
    size = np.append(units, 1.0)
    products, targets = fold.rows.T @ fold.rows, fold.rows.T @ fold.targets
    np.testing.assert_allclose(
        products / np.outer(size, size), held.products / np.outer(size, size), atol=1e-9
    )
    np.testing.assert_allclose(targets / size[:, None], held.targets / size[:, None], atol=1e-9)
    rest, part = sums_of(x[count:], y[count:]), (Fold.of(x[:count], y[:count]),)
    plain = HeadSums(rest.weight, rest.products, rest.targets, rest.squares, True, part)
    one, other = closed_form_head(found), closed_form_head(plain)
    assert one.penalty == other.penalty and one.error == pytest.approx(other.error, rel=1e-6)
    np.testing.assert_allclose(one.weight * units, other.weight * units, rtol=1e-4, atol=1e-6)
    assert with_held_out(total, sums_of(x[:0], y[:0])) is total
