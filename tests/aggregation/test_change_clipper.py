"""One reply neither throws the model away nor fills an optimiser's moments for good."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fl_elastic.aggregation.change_clipper import ChangeClipper, UsualSizes
from fl_elastic.update import Manifest, PartialUpdate
from fl_elastic.update.manifest import Role

KNOWN = Manifest(
    ("w", "bias", "mean"),
    ((8,), (2,), (2,)),
    ("float32",) * 3,
    (Role.PARAMETER, Role.PARAMETER, Role.STATISTIC),
)
KNOWN_MATRIX = Manifest(("w", "bias"), ((2, 4), (2,)), ("float32",) * 2, (Role.PARAMETER,) * 2)
BASE = {"w": np.full(8, 0.5, np.float32), "bias": np.zeros(2, np.float32), "mean": np.zeros(2)}


def update(**values: float) -> PartialUpdate:
    deltas = {name: np.full(KNOWN.shape(name), v, np.float32) for name, v in values.items()}
    return PartialUpdate(deltas, dict.fromkeys(deltas, 1), 1)


def bounded(bounds: ChangeClipper, **values: float) -> dict[str, float]:
    found, _ = bounds.bounded(update(**values), KNOWN, BASE)
    return {name: float(delta.flat[0]) for name, delta in found.deltas.items()}


def rounds(bounds: ChangeClipper, number: int, *values: float) -> None:
    for _ in range(number):
        for value in values:
            bounded(bounds, w=value)
        bounds.close()


def first_round(*updates: PartialUpdate, manifest: Manifest = KNOWN, base: Any = BASE) -> list[Any]:
    """What becomes of a round's updates: those in doubt wait for the others."""
    bounds, found = ChangeClipper(10.0), {}
    held = [n for n, each in enumerate(updates) if bounds.doubted(each, manifest, base)]
    for n, each in enumerate(updates):
        if n in held:
            bounds.hear(each, manifest)
        else:
            found[n] = bounds.bounded(each, manifest, base)
    for n in held:
        found[n] = bounds.bounded(updates[n], manifest, base, heard=True)
    return [found[n] for n in range(len(updates))]


@pytest.mark.parametrize("huge", [9e29, -9e29, 1e6])
def test_in_the_first_round_what_the_others_do_is_usual(huge: float) -> None:
    *honest, lie = (update(w=v, bias=3 * v, mean=0.1) for v in (0.3, 0.2, 0.4, 0.5, huge))
    *kept, (found, shortened) = first_round(*honest, lie)
    assert not any(names for _, names in kept) and shortened == ["w", "bias"]
    # Ten times the largest but for a fifth of the clients.
    assert abs(float(found.deltas["w"][0])) == pytest.approx(10 * 0.5)
    assert abs(float(found.deltas["bias"][0])) == pytest.approx(10 * 1.5)


@pytest.mark.parametrize("clients", [1, 2, 3, 8])
def test_nothing_is_shortened_where_all_go_far(clients: int) -> None:
    """Biases that begin at nothing, and fast devices: many times as far as the model is large."""
    steps = [0.5 * 1.6**n for n in range(clients)]
    updates = [update(w=0.1, bias=7 * step) for step in steps]
    for (found, shortened), step in zip(first_round(*updates), steps, strict=True):
        assert not shortened and float(found.deltas["bias"][0]) == pytest.approx(7 * step)


def test_what_one_client_alone_trains_is_measured_by_what_others_do_elsewhere() -> None:
    small = {"w": np.full((2, 4), 0.5, np.float32), "bias": np.full(2, 0.5, np.float32)}
    others = [
        PartialUpdate({"bias": np.full(2, 0.1 * n, np.float32)}, {"bias": 1}, 1) for n in (1, 2, 3)
    ]
    lie = PartialUpdate({"w": np.full((2, 4), 1e6, np.float32)}, {"w": 1}, 1)
    *_, (found, _) = first_round(*others, lie, manifest=KNOWN_MATRIX, base=small)
    # Ten times the 0.6 of its size that others change theirs.
    assert float(found.deltas["w"].flat[0]) == pytest.approx(10 * 0.6 * 0.5, rel=1e-3)


@pytest.mark.parametrize("huge", [9e29, -9e29])
def test_one_client_alone_goes_a_thousand_times_as_far_as_the_model_is_large(huge: float) -> None:
    ((found, shortened),) = first_round(update(w=huge, mean=huge))
    assert shortened == ["w"] and abs(float(found.deltas["w"][0])) == pytest.approx(1000 * 0.5)
    # Statistics have no such measure.
    assert float(found.deltas["mean"][0]) == pytest.approx(huge)


def test_what_is_usual_is_the_largest_change_but_for_a_fifth() -> None:
    bounds = ChangeClipper(10.0)
    rounds(bounds, 1, 0.01, 0.012, 0.008, 0.4)
    assert bounded(bounds, w=0.09) == pytest.approx({"w": 0.09})
    assert bounded(bounds, w=5.0)["w"] == pytest.approx(0.12)
    for liars, usual in ((2, 0.01), (3, 1.0)):
        bounds = ChangeClipper(10.0)
        rounds(bounds, 1, *[0.01] * (10 - liars), *[1.0] * liars)
        assert bounded(bounds, w=100.0)["w"] == pytest.approx(10 * usual)


def test_fast_devices_that_take_many_times_the_steps_of_most_are_not_shortened() -> None:
    """Momentum and twenty steps against one of each slow device: a hundred times as far."""
    bounds = ChangeClipper(30.0)
    rounds(bounds, 1, 0.0002, 0.0002, 0.0002, 0.019, 0.02)
    assert bounded(bounds, w=0.02) == pytest.approx({"w": 0.02})


def test_rounding_is_never_large() -> None:
    """A bias before a BatchNorm has no gradient: a few steps add up what rounding leaves."""
    bounds = ChangeClipper(30.0)
    rounds(bounds, 1, *[2e-10] * 5)
    assert bounded(bounds, w=4e-6)["w"] == pytest.approx(4e-6)
    assert bounded(bounds, w=1e-3)["w"] == pytest.approx(6e-9)


def test_one_step_of_one_device_is_not_what_is_usual() -> None:
    bounds = ChangeClipper(30.0)
    rounds(bounds, 1, 0.0002)
    assert bounded(bounds, w=0.02) == pytest.approx({"w": 0.02})
    rounds(bounds, 1, 0.0002, 0.0002)
    # Three are known now.
    assert bounded(bounds, w=0.02)["w"] == pytest.approx(30 * 0.0002)


def test_what_is_known_of_a_tensor_outlasts_a_restart() -> None:
    bounds, other = ChangeClipper(30.0), ChangeClipper(30.0)
    rounds(bounds, 1, 0.0002, 0.0002)
    other.restore(bounds.to_state())
    for each in (bounds, other):
        rounds(each, 1, 0.0004)
    assert other.to_state() == bounds.to_state()
    assert bounds.to_state().usual == {"w": pytest.approx((0.0002,))}
    with pytest.raises(ValueError, match="are not valid sizes"):
        UsualSizes({}, {"w": (float("nan"),)})


def test_honest_changes_may_grow() -> None:
    bounds = ChangeClipper(10.0)
    rounds(bounds, 3, 0.001, 0.001, 0.001)
    rounds(bounds, 1, 0.5, 0.5, 0.5)
    rounds(bounds, 1, 0.5, 0.5, 0.5)
    rounds(bounds, 1, 0.5, 0.5, 0.5)
    assert bounded(bounds, w=0.5) == pytest.approx({"w": 0.5})


def test_one_client_alone_grows_slowly() -> None:
    bounds = ChangeClipper(10.0)
    rounds(bounds, 1, 0.01, 0.01, 0.01)
    rounds(bounds, 3, 1e30)
    assert bounded(bounds, w=1e30)["w"] <= 10 * 0.01 * 2**3 * 1.001


def test_a_model_of_zeros_can_begin() -> None:
    zeros = {name: np.zeros_like(array) for name, array in BASE.items()}
    bounds = ChangeClipper(10.0)
    found, shortened = bounds.bounded(update(w=0.9), KNOWN, zeros)
    assert not shortened and float(found.deltas["w"][0]) == pytest.approx(0.9)


def test_no_bound_changes_nothing() -> None:
    bounds = ChangeClipper(float("inf"))
    assert bounded(bounds, w=1e29)["w"] == pytest.approx(1e29)
