"""Velocities against the worked vectors and slow references; thresholds against a loop."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_elastic.methods.neurons.motion import Motion, within

CHANGES = (0.4, 0.2, 0.1, 0.1)


def velocities(changes: tuple[float, ...], mu: float) -> list[float]:
    motion, seen = Motion.at_rest(1), []
    for change in changes:
        motion = motion.after(np.array([change]), mu)
        seen.append(float(motion.velocity[0]))
    return seen


def test_the_papers_velocity_is_that_of_the_worked_vector() -> None:
    assert velocities(CHANGES, 0.5) == pytest.approx([0.0, 0.2, 0.0, 0.0])


@given(st.lists(st.floats(0, 2), min_size=1, max_size=8), st.floats(0, 0.5))
def test_velocities_are_those_of_the_published_loop(changes: list[float], mu: float) -> None:
    similar = [1.0 - change for change in changes]
    paper = [0.0]
    for before, now in pairwise(similar):
        paper.append(now - before - mu * paper[-1])
    assert velocities(tuple(changes), mu) == pytest.approx(paper, abs=1e-9)


def test_a_velocity_is_known_once_it_compares_something() -> None:
    motion = Motion.at_rest(1)
    known = []
    for _ in range(3):
        known.append(motion.known)
        motion = motion.after(np.zeros(1))
    assert known == [False, False, True]


def by_hand(score: list[float], sizes: list[float], budget: float) -> list[bool]:
    spent = 0.0
    for place in sorted(range(len(score)), key=lambda i: -score[i]):
        spent += sizes[place]
        if spent > budget:
            return [each > score[place] for each in score]
    return [True] * len(score)


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(1, 9)), min_size=1, max_size=12),
    st.integers(0, 60),
)
def test_a_budget_of_parameters_is_kept_to_one_neuron(
    pairs: list[tuple[int, int]], budget: int
) -> None:
    score, sizes = [float(a) for a, _ in pairs], [float(b) for _, b in pairs]
    trains = within(np.array(score), np.array(sizes), float(budget))
    assert trains.tolist() == by_hand(score, sizes, budget)
    spent = float(np.array(sizes)[trains].sum())
    assert spent <= budget
    frozen = sorted(set(np.array(score)[~trains]))
    if frozen:
        # The neurons of the next score do not all fit any more.
        more = trains | (np.array(score) == frozen[-1])
        assert float(np.array(sizes)[more].sum()) > budget
