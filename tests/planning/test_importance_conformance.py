"""Every registered importance score conforms, and the simple ones are what they say."""

from __future__ import annotations

import pytest

from fl_elastic.errors import TrainingError
from fl_elastic.planning.importance import IMPORTANCES
from fl_elastic.testing import Check, importance_checks, name_of
from fl_elastic.testing.probes import made_up_training

NAMES = [
    "elastic",
    "elastic_same_batch",
    "fisher",
]


def test_the_registered_scores_are_all_checked() -> None:
    assert IMPORTANCES.names() == NAMES
    assert len(importance_checks()) == 6
    assert len({name_of(check) for check in importance_checks()}) == 6


@pytest.mark.parametrize("check", importance_checks(), ids=name_of)
@pytest.mark.parametrize("name", NAMES)
def test_score_conforms(name: str, check: Check) -> None:
    score = IMPORTANCES.make(name)
    check(score)
    check(type(score))
    assert isinstance(score, type(IMPORTANCES.make(name)))


def test_batches_needed_are_those_that_are_read() -> None:
    needed = {name: IMPORTANCES.make(name).batches_needed for name in NAMES}
    assert needed == {
        "elastic": 2,
        "elastic_same_batch": 1,
        "fisher": 1,
    }


def test_a_broken_batch_is_named_in_one_line() -> None:
    score = IMPORTANCES.make("elastic")
    training = made_up_training()
    for broken in range(score.batches_needed):
        inputs, targets = training.batches[broken]
        kept = training.batches[broken]
        training.batches[broken] = (inputs * float("nan"), targets)
        with pytest.raises(TrainingError, match="probe batch is nan") as caught:
            score.score(training.probe(score.batches_needed))
        assert "\n" not in str(caught.value)
        training.batches[broken] = kept
