"""Lazy server optimisers against plain formulas: untouched tensors stay, touched ones move as published."""

from __future__ import annotations

import numpy as np
import pytest

from fl_elastic.aggregation import SERVER_OPTIMIZERS
from fl_elastic.errors import RegistryError, SettingError, UpdateError

BASE = {"w": np.array([1.0, -2.0], np.float32), "v": np.array([3.0], np.float32)}


def moved(change: float, base: dict[str, np.ndarray] = BASE) -> dict[str, np.ndarray]:
    return {"w": base["w"] + np.float32(change), "v": np.array(base["v"])}


def test_all_are_registered() -> None:
    assert SERVER_OPTIMIZERS.names() == ["adam", "agreement", "momentum", "sgd", "yogi"]
    with pytest.raises(RegistryError, match="adma"):
        SERVER_OPTIMIZERS.make("adma")


@pytest.mark.parametrize("name", SERVER_OPTIMIZERS.names())
def test_untouched_tensors_stay_whatever_happened_before(name: str) -> None:
    optimizer = SERVER_OPTIMIZERS.make(name)
    first = optimizer.step(BASE, moved(0.5), {"w"})
    assert first["v"].tolist() == [3.0] and not np.array_equal(first["w"], BASE["w"])
    # Nobody trains "w" now: an optimiser that is not lazy would go on along its momentum.
    second = optimizer.step(first, dict(first), {"v"})
    assert np.array_equal(second["w"], first["w"])
    assert second["w"].dtype == np.float32


def test_sgd_at_rate_one_is_the_merged_model() -> None:
    result = SERVER_OPTIMIZERS.make("sgd").step(BASE, moved(0.25), {"w"})
    assert result["w"].tolist() == [1.25, -1.75]
    half = SERVER_OPTIMIZERS.make("sgd", 0.5).step(BASE, moved(0.25), {"w"})
    assert half["w"].tolist() == [1.125, -1.875]


def test_momentum_adds_up() -> None:
    optimizer = SERVER_OPTIMIZERS.make("momentum")
    first = optimizer.step(BASE, moved(1.0), {"w"})
    second = optimizer.step(first, moved(1.0, first), {"w"})
    assert (first["w"] - BASE["w"]).tolist() == [1.0, 1.0]
    assert second["w"] - first["w"] == pytest.approx([1.9, 1.9])


@pytest.mark.parametrize("name", ["adam", "yogi"])
def test_adaptive_optimisers_follow_their_formula_per_touch(name: str) -> None:
    optimizer, weights = SERVER_OPTIMIZERS.make(name, 0.1), BASE
    mean = square = np.zeros(2)
    expected = BASE["w"].astype(float)
    count = 0
    for change, touched in ((0.5, True), (0.0, False), (-0.2, True), (0.1, True)):
        weights = optimizer.step(weights, moved(change, weights), {"w"} if touched else set())
        if not touched:
            continue
        count += 1
        mean = 0.9 * mean + 0.1 * change
        if name == "adam":
            square = 0.99 * square + 0.01 * change**2
            factor = np.sqrt(1 - 0.99 ** (count + 1)) / (1 - 0.9 ** (count + 1))
        else:
            square = square - 0.01 * change**2 * np.sign(square - change**2)
            factor = 1.0
        expected = expected + 0.1 * factor * mean / (np.sqrt(square) + 1e-3)
    assert weights["w"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", SERVER_OPTIMIZERS.names())
def test_a_refused_step_leaves_no_trace(name: str) -> None:
    optimizer = SERVER_OPTIMIZERS.make(name, 1e9)
    base = {"w": np.array([1.0], np.float16)}
    base = optimizer.step(base, {"w": base["w"] + np.float16(0)}, {"w"})
    before = optimizer.to_state()
    with pytest.raises(UpdateError, match="'w' beyond the range"):
        optimizer.step(base, {"w": base["w"] + np.float16(1000.0)}, {"w"})
    after = optimizer.to_state()
    assert before.counts and before.counts == after.counts
    assert before.moments.keys() == after.moments.keys()
    assert all(np.array_equal(each, after.moments[key]) for key, each in before.moments.items())


def test_a_negative_rate_is_refused() -> None:
    with pytest.raises(SettingError, match="learning rate"):
        SERVER_OPTIMIZERS.make("sgd", -1.0)
