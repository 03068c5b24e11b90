"""What earlier releases left in a state folder is read once more, or refused in one sentence.

The files in ``old_state`` were written by the last release that had a format for each of them.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
from scripted_clients import first_arrays
from small_federation import as_weights
from small_models import chain
from test_crafted_checkpoints import trained
from torch import nn, optim

from fl_elastic.budget import Budget
from fl_elastic.errors import ProfileError
from fl_elastic.flower import load_checkpoint
from fl_elastic.flower.client_state import ClientState
from fl_elastic.profiling import load_profile
from fl_elastic.profiling.execution import Execution, load_or_measure_execution
from fl_elastic.profiling.store import load_or_measure
from fl_elastic.streaming import SampleStore, StreamLearner
from fl_elastic.streaming.learner_state import load_state
from fl_elastic.streaming.round_inbox import RoundInbox
from fl_elastic.streaming.visit import Mark
from fl_elastic.testing import made_up_profile
from fl_elastic.training import SelectionState
from fl_elastic.update import Manifest
from fl_elastic.update.feedback import ErrorFeedback
from fl_elastic.update.manifest import Role
from fl_elastic.update.model_store import ModelStore

OLD = Path(__file__).parent / "old_state"


def left(name: str, target: Path) -> Path:
    """Put an old file where a reader looks for it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(OLD / name, target)
    return target


def test_a_run_goes_on_from_an_old_checkpoint(tmp_path: Path) -> None:
    path = left("round-000002.npz", tmp_path / "round-000002.npz")
    found = load_checkpoint(tmp_path, first_arrays())
    assert found is not None and found.server_round == 2
    assert found.state and found.strategies[0].startswith("PartialUpdates")
    with np.load(path) as stored:
        read = {f"array/{n}": a for n, a in found.arrays.items()}
        read |= {f"state/{n}": a for n, a in found.state.items()}
        assert set(read) == set(stored.files) - {"about"}
        for name, array in read.items():
            assert array.dtype == stored[name].dtype and np.array_equal(array, stored[name])
    # The same run, begun today, has the same model after two rounds and the same end.
    trained(tmp_path / "today")
    today = load_checkpoint(tmp_path / "today", first_arrays())
    assert today is not None and today.strategies == found.strategies
    assert list(today.arrays) == list(found.arrays)
    for name, array in found.arrays.items():
        np.testing.assert_allclose(array, today.arrays[name], rtol=1e-6, err_msg=name)
    resumed = trained(tmp_path, 4).arrays
    for name, array in as_weights(trained(tmp_path / "today", 4).arrays).items():
        np.testing.assert_allclose(
            as_weights(resumed)[name], array, rtol=1e-5, atol=1e-6, err_msg=name
        )


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.0), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
    )


def test_a_learner_goes_on_from_an_old_state(tmp_path: Path) -> None:
    path = left("learner.npz", tmp_path / "learner.npz")
    state = load_state(path)
    assert state is not None and state.facts["progress"]["observed"] == 60
    with SampleStore(tmp_path / "samples.db", 2**20) as store:
        learner = StreamLearner(
            net(), store, state_dir=tmp_path, budget=Budget(), policy="full",
            optimizer_fn=lambda parameters: optim.Adam(parameters, lr=0.02), detector="none",
        )  # fmt: skip
        assert learner.progress.observed == 60 and learner.progress.adaptations == 1
        assert learner.classes == (2, 1, 0)
        weights = {n: t.numpy().copy() for n, t in learner.model.state_dict().items()}
        assert float(weights["5.weight"].sum()) == pytest.approx(-0.6913866)
        assert {name: a.tolist() for name, a in state.under("model.").items()} == {
            name: a.tolist() for name, a in weights.items()
        }
        assert learner.save()
        learner.close()
    again = load_state(path)
    assert again is not None and again.facts["progress"]["observed"] == 60
    assert not list(tmp_path.glob("*damaged*"))


def test_an_old_result_of_a_round_is_taken_up(tmp_path: Path) -> None:
    left("inbox-round.npz", tmp_path / "inbox" / "round.npz")
    found = RoundInbox(tmp_path).claim()
    assert found is not None
    assert (found.name, found.after, found.new) == ("one", "zero", (5,))
    assert found.change.labels == (7, 3, 5) and found.change.head == ("5.bias",)
    assert found.change.weights["5.bias"].tolist() == [0.5, 0.0, 4.0]


def test_an_old_mark_is_read(tmp_path: Path) -> None:
    left("round.json", tmp_path / "round.json")
    assert Mark.load(tmp_path) == Mark(1, 2, 3, 4, 5)


def test_old_residuals_are_read() -> None:
    manifest = Manifest(
        ("conv", "bias", "mean", "file"), ((4, 3, 2, 2), (40,), (5,), ()), ("float32",) * 4,
        (Role.PARAMETER, Role.PARAMETER, Role.STATISTIC, Role.PARAMETER),
    )  # fmt: skip
    found = ErrorFeedback.load(OLD / "feedback.npz", manifest).residuals
    assert set(found) == {"bias", "file"} and found["file"] == 0.5
    assert np.array_equal(found["bias"], np.arange(40, dtype=np.float32) / 8)


def test_old_importance_is_read(tmp_path: Path) -> None:
    manifest = Manifest.of(chain())
    left("selection.json", tmp_path / f"selection-{manifest.hash}.json")
    expected = SelectionState(("a", "b", "c"), [1.0, 0.5, None], [0, 1, 2], 5, 20)
    assert ClientState(tmp_path, manifest).selection == expected


def test_an_old_execution_is_not_measured_again(tmp_path: Path) -> None:
    path = left("execution.json", tmp_path / "execution.json")

    def measure() -> Execution:
        raise AssertionError("measured although it is kept")

    assert load_or_measure_execution(path, "a case", measure) == Execution(3, True)


def test_an_old_cost_profile_is_refused_and_measured_anew(tmp_path: Path) -> None:
    path, fresh = left("profile.json", tmp_path / "profile.json"), made_up_profile(groups=3)
    with pytest.raises(ProfileError, match=r"version 3, expected 4\); delete it to measure anew"):
        load_profile(path)
    assert load_or_measure(path, fresh.key, lambda: fresh) is fresh
    assert load_profile(path, fresh.key).graph == fresh.graph


def test_an_old_model_is_sent_whole_once_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = ModelStore(left("model.bin", tmp_path / "model")).load(Manifest.of(chain()))
    assert found is None and "is not used" in caplog.text
