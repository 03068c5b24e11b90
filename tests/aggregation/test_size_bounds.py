"""One reply neither throws the model away nor fills an optimiser's moments for good."""

from __future__ import annotations

import numpy as np
import pytest

from fl_elastic.aggregation.size_bounds import SizeBounds
from fl_elastic.update import Manifest, PartialUpdate
from fl_elastic.update.manifest import Role

KNOWN = Manifest(
    ("w", "bias", "mean"),
    ((8,), (2,), (2,)),
    ("float32",) * 3,
    (Role.PARAMETER, Role.PARAMETER, Role.STATISTIC),
)
BASE = {"w": np.full(8, 0.5, np.float32), "bias": np.zeros(2, np.float32), "mean": np.zeros(2)}


def update(**values: float) -> PartialUpdate:
    deltas = {name: np.full(KNOWN.shape(name), v, np.float32) for name, v in values.items()}
    return PartialUpdate(deltas, dict.fromkeys(deltas, 1), 1)


def bounded(bounds: SizeBounds, **values: float) -> dict[str, float]:
    found, _ = bounds.bounded(update(**values), KNOWN, BASE)
    return {name: float(delta.flat[0]) for name, delta in found.deltas.items()}


def rounds(bounds: SizeBounds, number: int, *values: float) -> None:
    for _ in range(number):
        for value in values:
            bounded(bounds, w=value)
        bounds.close()


@pytest.mark.parametrize("huge", [9e29, -9e29, 1e6])
def test_the_first_round_is_bounded_by_the_model_itself(huge: float) -> None:
    bounds = SizeBounds(10.0)
    found = bounded(bounds, w=huge, bias=huge, mean=huge)
    # Four times the tensor's size, 0.5, or the model's, about 0.45; statistics have no such measure.
    assert abs(found["w"]) == pytest.approx(4 * 0.5)
    assert 4 * 0.4 < abs(found["bias"]) < 4 * 0.5
    assert found["mean"] == pytest.approx(huge)


def test_what_is_usual_follows_the_median_of_a_round() -> None:
    bounds = SizeBounds(10.0)
    rounds(bounds, 1, 0.01, 0.012, 0.008, 0.4)
    assert bounded(bounds, w=0.09) == pytest.approx({"w": 0.09})
    assert bounded(bounds, w=5.0)["w"] == pytest.approx(0.11, rel=0.2)


def test_honest_changes_may_grow() -> None:
    bounds = SizeBounds(10.0)
    rounds(bounds, 3, 0.001, 0.001, 0.001)
    rounds(bounds, 1, 0.5, 0.5, 0.5)
    rounds(bounds, 1, 0.5, 0.5, 0.5)
    rounds(bounds, 1, 0.5, 0.5, 0.5)
    assert bounded(bounds, w=0.5) == pytest.approx({"w": 0.5})


def test_one_client_alone_grows_slowly() -> None:
    bounds = SizeBounds(10.0)
    rounds(bounds, 1, 0.01, 0.01, 0.01)
    rounds(bounds, 3, 1e30)
    assert bounded(bounds, w=1e30)["w"] <= 10 * 0.01 * 2**3 * 1.001


def test_a_model_of_zeros_can_begin() -> None:
    zeros = {name: np.zeros_like(array) for name, array in BASE.items()}
    bounds = SizeBounds(10.0)
    found, shortened = bounds.bounded(update(w=0.9), KNOWN, zeros)
    assert not shortened and float(found.deltas["w"][0]) == pytest.approx(0.9)


def test_no_bound_changes_nothing() -> None:
    bounds = SizeBounds(float("inf"))
    assert bounded(bounds, w=1e29)["w"] == pytest.approx(1e29)


def test_it_outlasts_a_restart() -> None:
    one, other = SizeBounds(10.0), SizeBounds(10.0)
    rounds(one, 2, 0.01, 0.02, 0.03)
    other.from_arrays(one.to_arrays())
    assert bounded(one, w=1.0) == bounded(other, w=1.0)
    assert one.to_arrays().keys() == {"w"}
