"""How many passes above a cut make a round as long as one without."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_elastic.profiling.profile import trainable_part
from fl_elastic.testing import made_up_profile
from fl_elastic.training import TrainablePart, TrainerOptions
from fl_elastic.training.costs import passes_above_cut


@given(
    groups=st.integers(2, 12), seed=st.integers(0, 10_000), place=st.integers(0, 11),
    speedup=st.floats(1.0, 8.0),
)  # fmt: skip
def test_they_take_as_long_as_one_pass_over_everything_within_the_budget(
    groups: int, seed: int, place: int, speedup: float
) -> None:
    profile = made_up_profile(groups, seed=seed)
    cut = profile.group_names[min(place, groups - 1)]
    options = TrainerOptions(part=TrainablePart(cut=cut))
    above = trainable_part(profile, profile.graph.groups_above(cut)).full_step_seconds
    found = passes_above_cut(profile, options, 100, speedup)
    allowed = profile.full_step_seconds / speedup
    assert 1 <= found <= 16
    assert found == 1 or found * above <= allowed * (1 + 1e-9)
    assert found == 16 or (found + 1) * above > allowed * (1 - 1e-9)
    assert (
        passes_above_cut(profile, replace(options, part=TrainablePart(cut="")), 100, speedup) == 1
    )


@pytest.mark.parametrize(
    ("group", "examples", "speedup"), [(-1, 100, 1.0), (0, 9, 1e6)], ids=["all is above", "no time"]
)
def test_a_cut_that_saves_nothing_leaves_one_pass(
    group: int, examples: int, speedup: float
) -> None:
    profile = made_up_profile(5)
    options = TrainerOptions(part=TrainablePart(cut=profile.group_names[group]))
    assert passes_above_cut(profile, options, examples, speedup) == 1
