"""What groups are worth to a policy: own importance, the fleet's, and the turn of what was left out."""

from __future__ import annotations

import numpy as np
import pytest

from fl_elastic.errors import BudgetError
from fl_elastic.training import FleetTerms, SelectionState, TrainerOptions
from fl_elastic.training.selection import Reselection

NAMES = ("head", "middle", "stem")
SIZES = np.array([1.0, 1.0, 2.0])
FLEET = {"head": 0.2, "middle": 0.2, "stem": 0.6}


def worth(
    scores: list[float], fleet: FleetTerms | None = None, exploration: float = 0.0
) -> list[float]:
    state = SelectionState(
        names=NAMES, scores=scores, left_out=[0, 0, 0], rules=Reselection(exploration=exploration)
    )
    return state.worth(fleet or FleetTerms(), SIZES).tolist()


def test_own_and_fleet_importance_are_blended() -> None:
    assert worth([3.0, 1.0, 0.0]) == [0.75, 0.25, 0.0]
    blended = worth([3.0, 1.0, 0.0], FleetTerms(FLEET, 0.5))
    assert blended == pytest.approx([0.475, 0.225, 0.3])


def test_without_scores_the_fleets_count_in_full() -> None:
    assert worth([], FleetTerms(FLEET, 0.1)) == pytest.approx([0.2, 0.2, 0.6])


def test_without_either_a_group_is_worth_its_presence() -> None:
    presence = [(1 / 3 + share) / 2 for share in (0.25, 0.25, 0.5)]
    assert worth([]) == pytest.approx(presence)
    assert worth([], exploration=0.2) == pytest.approx([0.2 * each for each in presence])


@pytest.mark.parametrize("blend", [1.0, -0.1])
def test_an_impossible_blend_is_refused(blend: float) -> None:
    with pytest.raises(BudgetError, match="blend"):
        FleetTerms(FLEET, blend)


def test_a_pull_below_none_is_refused() -> None:
    with pytest.raises(BudgetError, match="proximal"):
        TrainerOptions(proximal=-1.0)
