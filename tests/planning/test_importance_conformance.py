"""Every registered importance score conforms, and the simple ones are what they say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fl_elastic.errors import TrainingError
from fl_elastic.planning.importance import IMPORTANCES
from fl_elastic.testing import Check, importance_checks, name_of
from fl_elastic.testing.probes import made_up_training

NAMES = [
    "elastic",
    "elastic_same_batch",
    "fisher",
    "gradient_norm",
    "learned",
    "magnitude",
    "random",
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
        "gradient_norm": 1,
        "learned": 1,
        "magnitude": 0,
        "random": 0,
    }


def test_magnitude_sums_absolute_weights() -> None:
    training = made_up_training()
    probe = training.probe(0)
    expected = [
        sum(training.model.get_parameter(name).abs().sum().item() for name in group.parameters)
        for group in probe.groups
    ]
    assert IMPORTANCES.make("magnitude").score(probe) == pytest.approx(expected, rel=1e-6)


def test_gradient_norm_is_that_of_a_real_backward_pass() -> None:
    training = made_up_training()
    probe = training.probe(1)
    found = IMPORTANCES.make("gradient_norm").score(probe)
    model = training.model
    model.zero_grad(set_to_none=True)
    torch.autograd.backward(probe.loss_fn(model(probe.batches[0][0]), probe.batches[0][1]))
    expected = []
    for group in probe.groups:
        gradients = [model.get_parameter(name).grad for name in group.parameters]
        expected.append(torch.cat([g.flatten() for g in gradients if g is not None]).norm().item())
    assert found == pytest.approx(expected, rel=1e-5)


def test_random_scores_come_from_the_probes_generator() -> None:
    training = made_up_training()
    score = IMPORTANCES.make("random")
    once, other = (score.score(training.probe(0, seed=seed)) for seed in (1, 2))
    assert not np.array_equal(once, other)
    assert ((once >= 0) & (once < 1)).all()
    probe = training.probe(0, seed=1)
    assert np.array_equal(score.score(probe), once)
    assert not np.array_equal(score.score(probe), once)


@pytest.mark.parametrize("name", ["elastic", "gradient_norm"])
def test_a_broken_batch_is_named_in_one_line(name: str) -> None:
    score = IMPORTANCES.make(name)
    training = made_up_training()
    for broken in range(score.batches_needed):
        inputs, targets = training.batches[broken]
        kept = training.batches[broken]
        training.batches[broken] = (inputs * float("nan"), targets)
        with pytest.raises(TrainingError, match="probe batch is nan") as caught:
            score.score(training.probe(score.batches_needed))
        assert "\n" not in str(caught.value)
        training.batches[broken] = kept
