"""Parts of tensors, step normalisation, probabilities, staleness and weights, against plain formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fl_elastic.aggregation import MergeOptions, PartialMean
from fl_elastic.errors import SettingError
from fl_elastic.update import Manifest, PartialUpdate
from fl_elastic.update.manifest import Role

WIDE = Manifest(("w", "s"), ((3, 2), (2,)), ("float64",) * 2, (Role.PARAMETER, Role.STATISTIC))
BASE = {"w": np.zeros((3, 2)), "s": np.zeros(2)}


def update(value: float, examples: int = 1, steps: int = 1, **more: Any) -> PartialUpdate:
    return PartialUpdate({"w": np.full((3, 2), value)}, {"w": steps}, examples, **more)


def rows(value: float, kept: list[bool], examples: int = 1) -> PartialUpdate:
    mask = np.array(kept)
    delta = np.where(mask[:, None], value, 0.0) * np.ones((3, 2))
    return PartialUpdate({"w": delta}, {"w": 1}, examples, parts={"w": (mask, None)})


def merged(mean: PartialMean) -> NDArray[Any]:
    return mean.finish(BASE)["w"]


def test_contributors_of_a_part_count_in_that_part_alone() -> None:
    mean = PartialMean(WIDE)
    mean.add(update(1.0, examples=3))
    mean.add(rows(5.0, [True, False, False]))
    # (3 * 1 + 1 * 5) / 4 in the first row; one contributor in the others.
    assert merged(mean).tolist() == [[2.0, 2.0], [1.0, 1.0], [1.0, 1.0]]


def test_elements_that_nobody_trained_stay() -> None:
    mean = PartialMean(WIDE)
    mean.add(rows(5.0, [True, False, False]))
    mean.add(rows(3.0, [True, True, False]))
    assert merged(mean).tolist() == [[4.0, 4.0], [3.0, 3.0], [0.0, 0.0]]


@given(seed=st.integers(0, 10_000))
def test_parts_on_both_axes_are_a_mean_over_the_holders_of_each_element(seed: int) -> None:
    """HeteroFL's rule, with a loop over elements."""
    rng = np.random.default_rng(seed)
    mean = PartialMean(WIDE, options=MergeOptions(weighting="uniform"))
    total, held = np.zeros((3, 2)), np.zeros((3, 2))
    for _ in range(4):
        outs, ins = int(rng.integers(1, 4)), int(rng.integers(1, 3))
        masks = np.arange(3) < outs, np.arange(2) < ins
        delta = rng.standard_normal((3, 2)) * np.outer(*masks)
        whole = outs == 3 and ins == 2
        parts = {} if whole else {"w": masks}
        mean.add(PartialUpdate({"w": delta}, {"w": 1}, int(rng.integers(1, 99)), parts=parts))
        for i in range(outs):
            for j in range(ins):
                total[i, j] += delta[i, j]
                held[i, j] += 1
    expected = np.divide(total, held, out=np.zeros((3, 2)), where=held > 0)
    assert merged(mean) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_steps_are_normalised_as_in_fednova() -> None:
    mean = PartialMean(WIDE, options=MergeOptions(normalise_steps=True))
    mean.add(update(8.0, examples=1, steps=8))
    mean.add(update(-2.0, examples=3, steps=2))
    # Per step +1 and -1, weights 1 and 3: mean -1/2; mean steps (8 + 3 * 2) / 4 = 3.5.
    assert merged(mean) == pytest.approx(np.full((3, 2), -0.5 * 3.5))


def test_equal_steps_need_no_normalising() -> None:
    plain, normal = (
        PartialMean(WIDE, options=MergeOptions(normalise_steps=on)) for on in (False, True)
    )
    for mean in (plain, normal):
        mean.add(update(3.0, examples=2, steps=5))
        mean.add(update(-1.0, examples=7, steps=5))
    assert merged(normal) == pytest.approx(merged(plain), rel=1e-12)


def test_statistics_are_not_normalised() -> None:
    mean = PartialMean(WIDE, options=MergeOptions(normalise_steps=True))
    for steps, value in ((1, 2.0), (9, 4.0)):
        mean.add(PartialUpdate({"s": np.full(2, value)}, {"s": steps}, 1))
    assert mean.finish(BASE)["s"].tolist() == [3.0, 3.0]


def test_probabilities_make_up_for_rare_training() -> None:
    mean = PartialMean(WIDE, "inverse_probability")
    mean.add(update(1.0), probabilities={"w": 0.5})
    for _ in range(3):
        mean.add(PartialUpdate({}, {}, 1))
    # 1 / 0.5 of the weight of four clients.
    assert merged(mean) == pytest.approx(np.full((3, 2), 2.0 / 4.0))


def test_the_step_is_never_longer_than_the_contributors_mean() -> None:
    mean = PartialMean(WIDE, "inverse_probability")
    for _ in range(2):
        mean.add(update(1.0), probabilities={"w": 0.25})
    assert merged(mean) == pytest.approx(np.ones((3, 2)))


def test_probabilities_below_the_floor_count_as_the_floor() -> None:
    mean = PartialMean(WIDE, "inverse_probability")
    mean.add(update(1.0), probabilities={"w": 1e-6})
    for _ in range(9):
        mean.add(PartialUpdate({}, {}, 1))
    assert merged(mean) == pytest.approx(np.full((3, 2), 5.0 / 10.0))


def test_late_updates_count_less() -> None:
    mean = PartialMean(WIDE)
    mean.add(update(1.0))
    mean.add(update(4.0), staleness=3)
    # (1 + 3) to the power of -1/2 is a half.
    assert merged(mean) == pytest.approx(np.full((3, 2), (1.0 + 0.5 * 4.0) / 1.5))
    full = PartialMean(WIDE, options=MergeOptions(staleness_power=0.0))
    full.add(update(1.0))
    full.add(update(4.0), staleness=3)
    assert merged(full) == pytest.approx(np.full((3, 2), 2.5))


def test_uniform_weights_count_clients() -> None:
    mean = PartialMean(WIDE, options=MergeOptions(weighting="uniform"))
    mean.add(update(1.0, examples=1000))
    mean.add(update(2.0, examples=1))
    assert merged(mean) == pytest.approx(np.full((3, 2), 1.5))


@pytest.mark.parametrize(
    "options",
    [
        {"weighting": "size"}, {"staleness_power": -1.0}, {"staleness_power": np.nan},
        {"size_bound": 0.5}, {"size_bound": np.nan}, {"late": "keep"},
    ],
)  # fmt: skip
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=next(iter(options))):
        MergeOptions(**options)


def test_touched_names_what_was_trained() -> None:
    for rule in ("contributors", "median"):
        mean = PartialMean(WIDE, rule)
        assert mean.touched == frozenset()
        mean.add(update(1.0))
        assert mean.touched == {"w"}
