"""The price of a run with a cut is the sum over its rounds, step by step."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import GRAPHS, loss_fn, sgd
from torch import nn

from fl_elastic.planning.run_schedule import RunAtCut, RunLength, run_schedule
from fl_elastic.profiling import CostProfile, profile_model
from fl_elastic.profiling.memory import mask_bytes
from fl_elastic.profiling.prefix import measure_prefix

BATCH = 4


@pytest.fixture(scope="module")
def profiles() -> dict[str, CostProfile]:
    torch.manual_seed(0)
    found = {}
    ticks = iter(range(10**9))
    for name, (make, data) in GRAPHS.items():
        model, batch = make(), data(1)[0]
        batch = (batch[0][:BATCH], batch[1][:BATCH])
        profile = profile_model(model, loss_fn, batch, optimizer_fn=sgd)
        found[name] = measure_prefix(profile, model, batch, lambda: 1e-4 * next(ticks))
    return found


def step_by_step(profile: CostProfile, length: RunLength, above: int) -> float:
    """Return the seconds of a run: every example's features are computed when first met, if they can be kept."""
    graph = profile.graph
    cut = next(each for each in graph.cuts if each.groups_above == above)
    place = graph.cuts.index(cut)
    values = math.prod(graph.nodes[cut.node].shape[1:])
    inference = float(profile.cut_inference_seconds[place])
    mask = np.arange(len(graph.groups)) < above
    plain = profile.step_seconds(mask) - float(profile.cut_plain_seconds[place])
    reading = profile.lookup_seconds + profile.lookup_seconds_per_value * values * BATCH
    kept = min(1.0, length.feature_bytes / (2 * values * length.examples))
    seconds = 0.0
    for number in range(length.rounds * length.epochs):
        for _ in range(math.ceil(length.examples / BATCH)):
            missing = 1.0 - kept
            seconds += plain + min(missing * inference + reading, inference)
        if number == 0:
            seconds += kept * inference * length.examples / BATCH
    return seconds


@given(data=st.data())
@pytest.mark.parametrize("name", GRAPHS)
def test_a_run_costs_what_its_steps_cost(
    name: str, profiles: dict[str, CostProfile], data: st.DataObject
) -> None:
    profile = profiles[name]
    length = RunLength(
        rounds=data.draw(st.integers(1, 6)), epochs=data.draw(st.integers(1, 3)),
        examples=data.draw(st.integers(1, 30)), feature_bytes=data.draw(st.integers(1, 10**5)),
    )  # fmt: skip
    schedule = run_schedule(profile, length)
    assert schedule[-1].deepest_group == profile.group_names[-1]
    steps = length.rounds * length.epochs * math.ceil(length.examples / BATCH)
    assert schedule[-1].seconds == pytest.approx(steps * profile.full_step_seconds)
    for each in schedule[:-1]:
        above = profile.group_names.index(each.deepest_group) + 1
        expected = step_by_step(profile, length, above)
        # A price of no time at all, after a prefix that seemed slower than the step, is a tiny one.
        assert each.seconds == pytest.approx(expected, rel=1e-6, abs=1e-6 * steps)


@pytest.mark.parametrize("name", GRAPHS)
def test_what_lies_above_and_what_it_needs(name: str, profiles: dict[str, CostProfile]) -> None:
    profile = profiles[name]
    for each in run_schedule(profile, RunLength(2, 1, 8, 10**9)):
        above = profile.group_names.index(each.deepest_group) + 1
        mask = np.arange(len(profile)) < above
        assert each.step_bytes == mask_bytes(profile, mask)
        shares = profile.parameter_bytes[:above].sum() / profile.parameter_bytes.sum()
        assert each.trained_share == pytest.approx(shares)


@pytest.mark.parametrize("name", GRAPHS)
def test_it_pays_from_the_round_on_in_which_a_run_of_so_many_is_ahead(
    name: str, profiles: dict[str, CostProfile]
) -> None:
    profile = profiles[name]
    runs: dict[int, list[RunAtCut]] = {
        rounds: run_schedule(profile, RunLength(rounds, 1, 8, 10**9)) for rounds in range(1, 9)
    }
    for place, each in enumerate(runs[1][:-1]):
        ahead = [rounds for rounds, run in runs.items() if run[place].seconds <= run[-1].seconds]
        if each.pays_after is None or each.pays_after > 8:
            assert not ahead
        else:
            assert ahead[0] == each.pays_after


def test_a_model_that_cannot_be_cut_is_trained_whole() -> None:
    model = nn.Linear(3, 2)
    batch = (torch.randn(BATCH, 3), torch.zeros(BATCH, dtype=torch.long))
    profile = profile_model(model, nn.functional.cross_entropy, batch, optimizer_fn=sgd)
    (only,) = run_schedule(profile, RunLength(3, 1, 8, 100))
    assert (only.trained_share, only.first_pass_seconds, only.pays_after) == (1.0, 0.0, None)
