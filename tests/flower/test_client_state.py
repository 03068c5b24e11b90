"""What an ElasticClient keeps on disk, since its process lives for one message."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from crafted_archives import sealed
from flwr.app import ConfigRecord
from small_federation import build, elastic_client
from torch import nn

from fl_elastic import Budget, training
from fl_elastic.flower import ElasticClient
from fl_elastic.flower.client_round import ClientRound
from fl_elastic.flower.records import PACKED
from fl_elastic.flower.tasks.train import Train
from fl_elastic.groups import Mode
from fl_elastic.methods.neurons.policy import NeqPolicy
from fl_elastic.profiling import CostProfile, load_profile, save_profile
from fl_elastic.state.codec import read_state
from fl_elastic.training import SelectionState, Timing, TrainerOptions
from fl_elastic.training.selection import SELECTION
from fl_elastic.update import Manifest, decode, weights_of
from fl_elastic.update.model_wire import encode_weights


def elastic(
    state_dir: Path | None, model: nn.Module | None = None, **options: Any
) -> ElasticClient:
    steady = TrainerOptions(seed=3, timing=Timing(closed_loop=False))
    defaults = {"policy": "elastic", "budget": Budget(speedup=1.5), "options": steady}
    return elastic_client(model or build("none"), 4, state_dir=state_dir, **(defaults | options))


def profile_of(client: ElasticClient) -> CostProfile | None:
    return ClientRound(client, Train(), client.data).known_profile()


def fit(made: ElasticClient, model: nn.Module | None = None) -> bytes:
    """One round; fails unless the client sent an update that can be read."""
    manifest = Manifest.of(model or build("none"))
    data = encode_weights(weights_of(model or build("none"), manifest), manifest, version=1)
    arrays, examples, metrics = made.fit([np.frombuffer(data, np.uint8)], {PACKED: True})
    assert examples > 0, metrics
    packed = arrays[0].tobytes()
    assert decode(packed, manifest).deltas
    ConfigRecord(metrics)
    return packed


def paths(state_dir: Path, model: nn.Module | None = None) -> tuple[Path, Path]:
    key = Manifest.of(model or build("none")).hash
    return state_dir / f"profile-{key}.state", state_dir / f"selection-{key}.state"


def selection(path: Path) -> SelectionState:
    state = read_state(SelectionState, path, SELECTION)
    assert state.names
    return state


def test_profile_and_selection_appear(tmp_path: Path) -> None:
    state_dir = tmp_path / "made" / "if missing"
    made = elastic(state_dir)
    assert not state_dir.exists()
    fit(made)
    profile_path, selection_path = paths(state_dir)
    assert sorted(state_dir.iterdir()) == sorted([profile_path, selection_path])
    profile = load_profile(profile_path)
    assert made.report is not None
    assert profile.full_step_seconds == made.report.full_step_seconds
    assert selection(selection_path).names == profile.group_names


def test_a_policy_that_trains_everything_keeps_no_selection_of_its_own(tmp_path: Path) -> None:
    full: dict[str, Any] = {"budget": Budget(), "policy": "full"}
    fit(elastic(tmp_path, **full))
    _, path = paths(tmp_path)
    assert not path.exists()
    fit(elastic(tmp_path, policy="head"))
    assert any(selection(path).left_out)
    fit(elastic(tmp_path, **full))
    assert not any(selection(path).left_out)


def test_nothing_is_written_without_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fit(elastic(None))
    assert list(tmp_path.iterdir()) == []


def test_the_profile_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(elastic(tmp_path))

    def again(*arguments: object, **options: object) -> None:
        raise AssertionError("measured although a profile is stored")

    monkeypatch.setattr("fl_elastic.profiling.estimate.estimate_profile", again)
    fit(elastic(tmp_path))
    assert load_profile(paths(tmp_path)[0]).estimated


def test_the_selection_goes_on_where_the_last_process_ended(tmp_path: Path) -> None:
    """Two clients of one fit each, on one directory, are one client of two fits."""
    fit(elastic(tmp_path / "two"))
    stored = elastic(tmp_path / "two", profile=load_profile(paths(tmp_path / "two")[0]))
    profile = profile_of(stored)
    fit(stored)

    (tmp_path / "one").mkdir()
    one = elastic(tmp_path / "one", profile=profile)
    fit(one)
    after_first = selection(paths(tmp_path / "one")[1])
    fit(one)
    assert selection(paths(tmp_path / "one")[1]) == selection(paths(tmp_path / "two")[1])
    assert selection(paths(tmp_path / "one")[1]) != after_first


def test_a_later_round_does_not_wait_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(elastic(tmp_path))
    waited: list[int] = []
    monkeypatch.setattr(os, "fsync", waited.append)
    before = paths(tmp_path)[1].read_bytes()
    fit(elastic(tmp_path))
    assert paths(tmp_path)[1].read_bytes() != before and not waited


def test_memory_of_a_profile_needs_no_second_look(tmp_path: Path) -> None:
    made = elastic(tmp_path)
    fit(made)
    paths(tmp_path)[0].unlink()
    fit(made)
    assert not paths(tmp_path)[0].exists()


DAMAGES: dict[str, bytes] = {
    "empty": b"",
    "a truncated archive": b"FLEA\x01\x00\x00\x00\xff",
    "no facts": sealed(b"{}"),
}


@pytest.mark.parametrize("which", [0, 1], ids=["profile", "selection"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_made_anew(damage: str, which: int, tmp_path: Path) -> None:
    fit(elastic(tmp_path))
    paths(tmp_path)[which].write_bytes(DAMAGES[damage])
    fit(elastic(tmp_path))
    profile_path, selection_path = paths(tmp_path)
    assert load_profile(profile_path).full_step_seconds > 0
    assert selection(selection_path).left_out


def test_another_model_has_files_of_its_own(tmp_path: Path) -> None:
    fit(elastic(tmp_path))
    before = [path.read_bytes() for path in paths(tmp_path)]
    other = build("group")
    fit(elastic(tmp_path, build("group")), other)
    assert len(list(tmp_path.iterdir())) == 4
    assert [path.read_bytes() for path in paths(tmp_path)] == before


def test_a_profile_of_another_case_is_replaced(tmp_path: Path) -> None:
    fit(elastic(tmp_path))
    path = paths(tmp_path)[0]
    kept = load_profile(path)
    save_profile(replace(kept, key=replace(kept.key, threads=64)), path)
    fit(elastic(tmp_path))
    assert load_profile(path).key.threads == torch.get_num_threads()


def test_a_directory_that_cannot_be_made_does_not_lose_the_round(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    made = elastic(blocked / "state")
    first = fit(made)
    assert fit(made) != b""
    assert blocked.read_text() == "in the way"
    assert first == fit(elastic(None, profile=profile_of(made)))
    warned = [record.getMessage() for record in caplog.records if record.name == "fl_elastic"]
    assert any("cost profile" in line for line in warned)
    assert any("cannot keep importance" in line for line in warned)
    assert not any("\n" in line for line in warned)


def test_a_directory_in_the_place_of_a_file_does_not_lose_the_round(tmp_path: Path) -> None:
    for path in paths(tmp_path):
        path.mkdir()
    fit(elastic(tmp_path))
    assert all(path.is_dir() for path in paths(tmp_path))


def test_what_a_policy_keeps_of_neurons_lasts_from_process_to_process(tmp_path: Path) -> None:
    counts, whole = [], []
    for turn in range(4):
        torch.manual_seed(turn)
        # The global model moves on between rounds, by whatever others have trained.
        moved = build("batch")
        with torch.no_grad():
            for parameter in moved.parameters():
                parameter.add_(0.02 * turn**2 * torch.randn_like(parameter))
        made = elastic(tmp_path, build("batch"), policy=NeqPolicy(eps=0.05), budget=Budget())
        fit(made, moved)
        memory = selection(paths(tmp_path, moved)[1]).memory
        counts.append(memory.facts["count"])
        assert made.report is not None
        whole.append(all(mode == Mode.FULL for mode in made.report.plan.modes))
    assert counts == [0, 1, 2, 3]
    assert whole == [True, True, False, False]
    assert selection(paths(tmp_path, moved)[1]).memory.nbytes < 8 << 20


def test_clients_without_a_folder_share_what_steps_cost_in_their_process() -> None:
    """Simulated clients are made anew for each message, and would estimate in each of their rounds."""

    def client_of(middle: nn.Module) -> ElasticClient:
        data = [(torch.randn(4, 7), torch.tensor([0, 1, 0, 1]))]
        model = nn.Sequential(nn.Linear(7, 9), middle, nn.Linear(9, 2))
        return ElasticClient(model, data, data, budget=Budget(), policy="full")

    first = client_of(nn.ReLU())
    first.forget_profile()
    assert profile_of(client_of(nn.ReLU())) is None
    first.fit(first.get_parameters({}), {})
    known = profile_of(client_of(nn.ReLU()))
    assert known is not None and known is profile_of(first)
    # The same parameters, and another model.
    assert profile_of(client_of(nn.Softplus())) is None
    first.forget_profile()
    assert profile_of(client_of(nn.ReLU())) is None


def test_the_deadline_of_a_round_begins_when_its_message_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passed: list[float | None] = []

    class Noting(training.ElasticTrainer):
        def __init__(self, *given: Any, budget: Budget, **named: Any) -> None:
            passed.append(budget.deadline)
            super().__init__(*given, budget=budget, **named)

    hands = iter([100.0, 130.0])
    monkeypatch.setattr(training, "ElasticTrainer", Noting)
    data = [(torch.randn(4, 7), torch.tensor([0, 1, 0, 1]))]
    client = ElasticClient(nn.Linear(7, 2), data, data, budget=Budget(deadline=60.0))
    weights = client.get_parameters({})
    monkeypatch.setattr(time, "perf_counter", lambda: next(hands))
    with monkeypatch.context() as only_here:
        only_here.setattr(training.ElasticTrainer, "fit", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            client.fit(weights, {})
    assert passed == [30.0]


def test_features_that_cannot_be_removed_cost_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = elastic(tmp_path).state
    assert state.features is not None
    (state.features / "inside").mkdir(parents=True)
    state.forget_features()
    assert state.features.is_dir() and f"cannot remove {state.features}" in caplog.text
