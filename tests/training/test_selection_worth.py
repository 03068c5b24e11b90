"""What groups are worth to a policy: importance, and the turn of what was left out."""

from __future__ import annotations

import numpy as np
import pytest
from trainer_settings import state_with

from fl_elastic.errors import SettingError
from fl_elastic.training import TrainerOptions

NAMES = ("head", "middle", "stem")
SIZES = np.array([1.0, 1.0, 2.0])


def worth(scores: list[float], exploration: float = 0.0) -> list[float]:
    return state_with(NAMES, scores, [0, 0, 0], exploration=exploration).worth(SIZES).tolist()


def test_shares_of_importance() -> None:
    assert worth([3.0, 1.0, 0.0]) == [0.75, 0.25, 0.0]


def test_without_scores_a_group_is_worth_its_presence() -> None:
    presence = [(1 / 3 + share) / 2 for share in (0.25, 0.25, 0.5)]
    assert worth([], exploration=0.2) == pytest.approx([0.2 * each for each in presence])


def test_a_pull_below_none_is_refused() -> None:
    with pytest.raises(SettingError, match="proximal"):
        TrainerOptions(proximal=-1.0)
