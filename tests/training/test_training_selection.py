"""The memory of importance: smoothing, drift, turns of the groups left out, and its stored form."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainer_settings import state_with

from fl_elastic.errors import ArchiveError
from fl_elastic.planning.request import PolicyMemory
from fl_elastic.state.archive import Archive, archive_bytes, archive_of
from fl_elastic.state.codec import from_archive, to_archive
from fl_elastic.training import SelectionState
from fl_elastic.training.selection import SELECTION

NAMES = ("head", "middle", "stem")
CONSTANTS = {"probe_every": 10, "below_cosine": 0.8, "smoothing": 0.5, "exploration": 0.1}


def fresh(**changes: float) -> SelectionState:
    state = state_with(**CONSTANTS | changes)
    state.fit_to(NAMES)
    return state


def step(state: SelectionState, steps: int) -> None:
    state.steps_since_probe += steps


def test_scores_that_were_never_measured_are_remembered_as_such() -> None:
    state = fresh()
    state.absorb(np.array([3.0, np.nan, -1.0]), together=False)
    assert from_archive(SelectionState, to_archive(state)).scores == [3.0, None, -1.0]


def test_the_first_probe_is_due_at_once_and_counts_as_drift() -> None:
    state = fresh()
    assert state.probe_due()
    assert state.absorb(np.array([2.0, 1.0, -4.0]))
    assert state.scores == [2.0, 1.0, -4.0]
    assert not state.probe_due()


def test_the_next_probe_is_due_after_the_gap() -> None:
    state = fresh()
    state.absorb(np.ones(3))
    step(state, 9)
    assert not state.probe_due()
    step(state, 1)
    assert state.probe_due()


def test_the_gap_doubles_up_to_eightfold_while_importance_stays_alike() -> None:
    state = fresh()
    gaps = []
    for _ in range(6):
        state.absorb(np.array([1.0, 0.5, 0.2]))
        gaps.append(state.probe_gap)
    assert gaps == [10, 20, 40, 80, 80, 80]


def test_drift_brings_the_gap_back() -> None:
    state = fresh()
    for _ in range(4):
        assert state.probe_gap in (0, 10, 20, 40)
        state.absorb(np.array([1.0, 0.0, 0.0]))
    assert state.absorb(np.array([0.0, 0.0, 1.0]))
    assert state.probe_gap == 10 and state.steps_since_probe == 0


@pytest.mark.parametrize(
    ("angle", "drifted"), [(30.0, False), (36.0, False), (38.0, True), (90.0, True)]
)
def test_drift_is_an_angle_between_old_and_new(angle: float, drifted: bool) -> None:
    # The cosine of 36.9 degrees is 0.8.
    state = fresh()
    state.absorb(np.array([1.0, 0.0, 0.0]))
    turned = np.array([np.cos(np.radians(angle)), np.sin(np.radians(angle)), 0.0])
    assert state.absorb(7.0 * turned) is drifted


def test_drift_does_not_depend_on_the_size_of_the_scores() -> None:
    state = fresh()
    state.absorb(np.array([1.0, 0.5, 0.2]))
    assert not state.absorb(1e-9 * np.array([1.0, 0.5, 0.2]))
    assert state.scores == pytest.approx([1e-9, 0.5e-9, 0.2e-9])


@pytest.mark.parametrize("smoothing", [0.0, 0.25, 0.9])
def test_scores_are_a_moving_average_of_scaled_probes(smoothing: float) -> None:
    state = fresh(smoothing=smoothing)
    state.absorb(np.array([1.0, 0.5, -0.5]))
    state.absorb(np.array([0.0, 8.0, 4.0]))
    expected = smoothing * np.array([1.0, 0.5, -0.5]) + (1 - smoothing) * np.array([0.0, 1.0, 0.5])
    assert state.scores == pytest.approx(8.0 * expected)


def test_groups_that_were_not_measured_keep_their_scores_and_the_gap() -> None:
    state = fresh()
    state.absorb(np.array([4.0, 2.0, 1.0]))
    step(state, 3)
    assert not state.absorb(np.array([2.0, 1.0, np.nan]), together=False)
    assert state.scores == pytest.approx([3.0, 1.5, 1.0])
    assert state.probe_gap == 10 and state.steps_since_probe == 3
    assert not state.absorb(np.full(3, np.nan), together=False)
    assert state.scores == pytest.approx([3.0, 1.5, 1.0])


def test_steps_count_until_all_groups_were_measured_together() -> None:
    state = fresh()
    step(state, 4)
    state.absorb(np.array([3.0, 1.0, np.nan]), together=False)
    assert state.steps_since_probe == 4
    state.absorb(np.ones(3))
    assert state.steps_since_probe == 0


def test_a_group_that_was_never_measured_counts_by_its_size() -> None:
    state = fresh(exploration=0.0)
    state.absorb(np.array([3.0, 1.0, np.nan]), together=False)
    assert state.scores == [3.0, 1.0, None]
    # Weights of 10, 30 and 60 are shares of 13/60, 19/60 and 28/60 with a third for being there.
    total = 4.0 * 60 / 32
    assert state.worth([10, 30, 60]) == pytest.approx(np.array([3.0, 1.0, total * 28 / 60]) / total)


def test_probes_of_zeros_are_taken_as_drift_and_divide_nothing() -> None:
    state = fresh()
    assert state.absorb(np.zeros(3))
    assert state.scores == [0.0, 0.0, 0.0]
    assert state.absorb(np.ones(3))
    assert np.isfinite(state.worth([1, 1, 1])).all()


def test_without_scores_a_group_is_worth_its_presence() -> None:
    presence = (1 / 3 + np.array([0.1, 0.3, 0.6])) / 2
    assert fresh().worth([10.0, 30.0, 60.0]) == pytest.approx(0.1 * presence)


def test_worth_is_the_share_of_importance_and_a_turn_for_those_left_out() -> None:
    state = fresh()
    state.scores, state.left_out = [1.0, -0.5, 3.0], [0, 4, 1]
    sizes = [10.0, 30.0, 60.0]
    presence = (1 / 3 + np.array([0.1, 0.3, 0.6])) / 2
    expected = np.array([0.25, 0.0, 0.75]) + 0.1 * presence * np.array([1, 5, 2])
    assert state.worth(sizes) == pytest.approx(expected)


@given(
    scores=st.lists(st.floats(-1, 1), min_size=1, max_size=6),
    left_out=st.integers(0, 100),
    exploration=st.floats(0.001, 1),
)
def test_worth_is_positive_and_grows_with_the_turns_missed(
    scores: list[float], left_out: int, exploration: float
) -> None:
    state = state_with(
        ("x",) * len(scores), scores, [left_out] * len(scores), exploration=exploration
    )
    later = replace(state, left_out=[left_out + 1] * len(scores))
    sizes = np.ones(len(scores))
    now, then = state.worth(sizes), later.worth(sizes)
    assert (now > 0).all() and (then > now).all()
    assert then - now == pytest.approx(exploration * np.ones(len(scores)) / len(scores))


def test_turns_missed_are_counted_per_fit() -> None:
    state = fresh()
    for mask in ([True, False, False], [True, True, False], [True, False, False]):
        state.trained(mask)
    assert state.left_out == [0, 1, 3]
    state.trained([False, False, True])
    assert state.left_out == [1, 2, 0]


def test_a_deep_fit_is_drawn_and_becomes_certain() -> None:
    state = fresh()
    state.left_out = [0, 1, 1]
    drawn = [state.draw_full_update(4, np.random.default_rng(seed)) for seed in range(400)]
    assert 60 < sum(drawn) < 140
    state.left_out = [0, 1, 8]
    assert all(state.draw_full_update(4, np.random.default_rng(seed)) for seed in range(50))
    state.left_out = [0, 0, 0]
    assert not any(state.draw_full_update(4, np.random.default_rng(seed)) for seed in range(50))
    state.left_out = [0, 99, 99]
    assert not state.draw_full_update(0, np.random.default_rng(0))


def test_another_models_scores_are_dropped() -> None:
    state = fresh()
    state.absorb(np.ones(3))
    state.trained([True, False, False])
    step(state, 5)
    kept = replace(state)
    state.fit_to(list(NAMES))
    assert state == kept
    state.fit_to(["other", "groups"])
    assert state == type(state)(("other", "groups"), [], [0, 0])


@given(
    scores=st.lists(st.floats(-1, 1), max_size=5),
    steps=st.integers(0, 10**6),
    gap=st.integers(1, 10**6),
)
def test_the_state_comes_back(scores: list[float], steps: int, gap: int) -> None:
    names = tuple(f"group {index} ä" for index in range(len(scores)))
    state = SelectionState(names, scores, [3] * len(scores), steps, gap)
    state.memory = PolicyMemory("mine", {"round": 3}, {"seen": np.ones(2, np.float16)})
    for kept in (state, replace(state, scores=[])):
        again = archive_of(archive_bytes(SELECTION, to_archive(kept)), SELECTION)
        found = from_archive(SelectionState, again)
        assert found == kept and found.memory.facts == {"round": 3}
        assert np.array_equal(found.memory.arrays["seen"], state.memory.arrays["seen"])


GOOD = to_archive(SelectionState(NAMES, [1.0, 0.5, 0.0], [0, 1, 2], 5, 20))
GARBAGE: dict[str, dict[str, Any]] = {
    "fewer scores": {"scores": [1.0]},
    "more counts": {"left_out": [0, 1, 2, 3]},
    "scores are words": {"scores": ["a", "b", "c"]},
    "scores are NaN": {"scores": [float("nan"), 0, 0]},
    "scores are infinite": {"scores": [float("inf"), 0, 0]},
    "scores are null": {"scores": None},
    "scores beyond floating point": {"scores": [10**400, 0, 0]},
    "counts are negative": {"left_out": [0, -1, 2]},
    "counts are infinite": {"left_out": [0, float("inf"), 2]},
    "steps are infinite": {"steps_since_probe": float("inf")},
    "steps are negative": {"steps_since_probe": -1},
    "gap is null": {"probe_gap": None},
    "gap is negative": {"probe_gap": -5},
    "names are a number": {"names": 5},
    "a time is negative": {"planning_seconds": -1.0},
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_what_no_fit_leaves_behind_is_refused(kind: str) -> None:
    assert from_archive(SelectionState, GOOD).scores == [1.0, 0.5, 0.0]
    with pytest.raises(ArchiveError):
        from_archive(SelectionState, Archive({**GOOD.facts, **GARBAGE[kind]}, {}))
