"""Which places are chosen: against ridge regression solved the slow way, each fold predicted from the others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from slow_ones import slow_unless

from fl_elastic.closed_form.ridge import PENALTIES
from fl_elastic.errors import UpdateError
from fl_elastic.readout.best_places import Choice, Sample, choose_places
from fl_elastic.readout.place import Place

Floats = NDArray[np.float64]
PARTS = 5
# Products of standardised features are in fp32, and the constant is penalised a millionth as much as a feature.
WITHIN = 1e-4
# The search goes downhill from a penalty of 1. Where errors have two valleys it may stay in the shallower one: of
# the cases below none was more than this share above the least.
PENALTY_GAP = 0.02


def places(count: int) -> list[Place]:
    return [Place(f"block{number}", "flat") for number in range(count)]


def case(seed: int, count: int, widths: tuple[int, ...], outputs: int = 3) -> Sample:
    """Features of unlike size and offset at each place, which tell the targets in part."""
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(count, 6))
    rows = {}
    for place, width in zip(places(len(widths)), widths, strict=True):
        seen = hidden * rng.uniform(0, 1, 6) ** 2
        mixed = seen @ rng.normal(size=(6, width)) + rng.uniform(0.2, 2) * rng.normal(
            size=(count, width)
        )
        rows[place] = mixed * 10.0 ** rng.uniform(-2, 2, width) + rng.normal(size=width)
    scores = hidden @ rng.normal(size=(6, outputs)) + 0.3 * rng.normal(size=(count, outputs))
    targets = np.eye(outputs)[scores.argmax(axis=1)] if seed % 2 else scores
    return Sample.of(rows, targets, rng.integers(0, PARTS, count))


def slow_ridge(x: Floats, y: Floats, held_down: float) -> Floats:
    """The weight that solves the normal equations, the bias, which is free, as last row."""
    rows = np.hstack([x, np.ones((len(x), 1))])
    free = np.diag(np.append(np.full(x.shape[1], held_down), 0.0))
    return np.asarray(np.linalg.solve(rows.T @ rows + free, rows.T @ y))


def slow_error(sample: Sample, chosen: tuple[Place, ...], penalty: float) -> float:
    """Each part predicted by least squares over the others, on features standardised by all examples."""
    x = np.hstack([sample.rows[place] for place in chosen])
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    y, left = sample.targets, 0.0
    numbers = np.unique(sample.folds)
    for part in range(min(PARTS, len(numbers))):
        out = np.isin(sample.folds, numbers[part::PARTS])
        weight = slow_ridge(x[~out], y[~out], penalty * len(y))
        left += float(((y[out] - x[out] @ weight[:-1] - weight[-1]) ** 2).sum())
    return left / float(((y - y.mean(axis=0)) ** 2).sum())


def least_slow_error(sample: Sample, chosen: tuple[Place, ...]) -> float:
    return min(slow_error(sample, chosen, float(penalty)) for penalty in PENALTIES)


# Features from a tenth of the examples to ten times as many.
CASES = [
    (seed, 20, widths)
    for seed, widths in enumerate(
        [(2, 2, 2), (2, 20, 4), (20, 19, 21), (200, 2, 20), (200, 100, 2), (10, 150, 200)] * 2
    )
]


def first(seed: int, count: int, widths: tuple[int, ...]) -> bool:
    """Whether it is tested each time."""
    return seed < 5


@pytest.mark.parametrize(("seed", "count", "widths"), slow_unless(first, CASES))
def test_errors_are_those_of_least_squares_over_the_other_folds(
    seed: int, count: int, widths: tuple[int, ...]
) -> None:
    sample = case(seed, count, widths)
    found = choose_places(sample, most_features=sum(widths))
    assert {each.places[0] for each in found.single} == set(sample.rows)
    for worth in (*found.single, *found.unions, found.best):
        slow = slow_error(sample, worth.places, worth.penalty)
        assert worth.error == pytest.approx(slow, rel=WITHIN), worth
        assert worth.features == sum(sample.rows[place].shape[1] for place in worth.places)


@pytest.mark.parametrize(("seed", "count", "widths"), slow_unless(first, CASES))
def test_the_penalty_is_nearly_the_best_of_all(
    seed: int, count: int, widths: tuple[int, ...]
) -> None:
    sample = case(seed, count, widths)
    found = choose_places(sample, most_features=sum(widths))
    for worth in (*found.single, *found.unions):
        least = least_slow_error(sample, worth.places)
        assert least * (1 - WITHIN) <= worth.error <= least * (1 + PENALTY_GAP), worth


@pytest.mark.parametrize(("seed", "count", "widths"), slow_unless(first, CASES))
def test_no_place_alone_and_no_single_addition_is_better(
    seed: int, count: int, widths: tuple[int, ...]
) -> None:
    sample = case(seed, count, widths)
    found = choose_places(sample, most_features=sum(widths))
    errors = [each.error for each in found.single]
    assert errors == sorted(errors)
    best = least_slow_error(sample, found.best.places)
    for place in sample.rows:
        assert best <= least_slow_error(sample, (place,)) * (1 + PENALTY_GAP)
        if place not in found.best.places:
            more = least_slow_error(sample, (*found.best.places, place))
            # A union has to explain half a percent more of what is left.
            assert more > best * (1 - 0.005 - PENALTY_GAP)


def same(one: Choice, other: Choice) -> None:
    assert one.best.name == other.best.name and one.best.penalty == other.best.penalty
    by_name = {each.name: each.error for each in other.single}
    for each in one.single:
        assert each.error == pytest.approx(by_name[each.name], rel=WITHIN)


def test_a_sample_whose_rows_count_twice_is_one_with_each_row_twice() -> None:
    sample = case(1, 40, (5, 20, 80))
    twice = Sample.of(
        {place: np.concatenate([rows, rows]) for place, rows in sample.rows.items()},
        np.concatenate([sample.targets] * 2),
        np.concatenate([sample.folds] * 2),
    )
    same(
        choose_places(sample.times(2.0), most_features=200), choose_places(twice, most_features=200)
    )


@pytest.mark.parametrize("clients", [2, 3, 7])
def test_of_many_clients_the_fifth_at_either_end_does_not_count(clients: int) -> None:
    samples = [case(11, 30, (4, 30)) for _ in range(clients)]
    for number, each in enumerate(samples):
        rng = np.random.default_rng(number)
        order = rng.permutation(30)[: 20 + number]
        samples[number] = Sample.of(
            {place: rows[order] for place, rows in each.rows.items()},
            each.targets[order],
            each.folds[order],
        )
    together = Sample.together(samples)
    (worth, *_) = choose_places(together, most_features=4).single
    x = together.rows[worth.places[0]]
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    y = together.targets
    squared = np.zeros(len(y))
    numbers = np.unique(together.folds)
    for part in range(PARTS):
        out = np.isin(together.folds, numbers[part::PARTS])
        weight = slow_ridge(x[~out], y[~out], worth.penalty * len(y))
        squared[out] = ((y[out] - x[out] @ weight[:-1] - weight[-1]) ** 2).sum(axis=1)
    of_clients = [
        (squared[together.clients == client].mean(), (together.clients == client).sum())
        for client in range(clients)
    ]
    outer = {2: 0, 3: 1, 7: 2}[clients]
    inner = sorted(of_clients)[outer : clients - outer]
    expected = np.average([each for each, _ in inner], weights=[count for _, count in inner])
    variance = ((y - y.mean(axis=0)) ** 2).sum() / len(y)
    assert worth.error == pytest.approx(expected / variance, rel=WITHIN)


def test_features_that_stand_still_or_are_huge_do_no_harm() -> None:
    sample = case(1, 60, (8, 8))
    still, huge = places(2)
    rows = {
        still: np.hstack([sample.rows[still], np.full((60, 3), 7.0)]),
        huge: 1e12 * sample.rows[huge] * 10.0 ** np.linspace(-9, 0, 8),
    }
    one = choose_places(sample, most_features=100)
    other = choose_places(replace(sample, rows=rows), most_features=100)
    same(one, other)


def test_what_cannot_be_chosen_from_is_said() -> None:
    sample = case(1, 20, (8, 9))
    with pytest.raises(UpdateError, match="at most 7 features"):
        choose_places(sample, most_features=7)
    with pytest.raises(UpdateError, match="the same target"):
        choose_places(replace(sample, targets=np.ones((20, 3))), most_features=99)
    with pytest.raises(UpdateError, match="equal or in one fold"):
        choose_places(replace(sample, folds=np.zeros(20, np.int64)), most_features=99)
    with pytest.raises(UpdateError, match="no place in common"):
        other = {Place("elsewhere", "flat"): np.ones((20, 2))}
        Sample.together([sample, replace(sample, rows=other)])
