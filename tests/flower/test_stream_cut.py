"""A device that streams takes part in rounds of a fleet with a cut, with features of its own and without."""

from __future__ import annotations

import json
import sqlite3
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_federation import arrays_of, as_weights, quiet
from small_federation import run as run_rounds
from spies import passing_below
from test_stream_client import BLIND, client_of, packed, streamed
from torch import nn

from fl_elastic import Budget
from fl_elastic.closed_form.head_sums_wire import decode_head_sums
from fl_elastic.flower import ElasticClient, PartialUpdates, RoundConfig, elastic_client_app
from fl_elastic.flower.records import IMPORTANCE, PACKED
from fl_elastic.flower.stream_client import StreamClient
from fl_elastic.flower.tasks.cut_worth import RateCuts
from fl_elastic.flower.tasks.solve_head import SolveHead
from fl_elastic.flower.tasks.task import RoundTask
from fl_elastic.flower.tasks.train import Train
from fl_elastic.streaming import Latent, StreamLearner
from fl_elastic.streaming.learner_state import load_state, save_state
from fl_elastic.training import evaluate
from fl_elastic.training.head_pass import head_sums
from fl_elastic.update import Manifest, PartialUpdate, decode, load_weights

sys.path.append(str(Path(__file__).parents[1] / "streaming"))
from toy_streams import blobs, closed, net, run, weights

CUT = "3"
TRAINED = {"3.weight", "3.bias", "5.weight", "5.bias"}


@pytest.fixture
def run_below(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many examples pass below a cut."""
    return passing_below(monkeypatch)


def asked(
    client: StreamClient, model: nn.Module, kind: type[RoundTask] = Train, **told: Any
) -> tuple[bytes, dict[str, Any]]:
    config = {PACKED: True, **kind(**told).to_config()}
    arrays, _, metrics = client.fit(packed(model), config)
    return (arrays[0].tobytes() if arrays else b""), metrics


def round_above(
    client: StreamClient, model: nn.Module, cut: str = CUT, **told: Any
) -> PartialUpdate:
    data, metrics = asked(client, model, cut=cut, keep_statistics=True, **told)
    assert "fl_elastic.error" not in metrics, metrics
    return decode(data, Manifest.of(model))


def refusal(client: StreamClient, model: nn.Module, **told: Any) -> str:
    return str(asked(client, model, **told)[1].get("fl_elastic.error", ""))


def with_head(model: nn.Module) -> nn.Module:
    """The same below the head."""
    with torch.no_grad():
        model[5].weight += 0.1  # type: ignore[union-attr, operator]
    return model


def test_below_the_cut_the_model_is_the_federations(tmp_path: Path) -> None:
    learner, server = streamed(tmp_path, guard=BLIND), net(seed=5)
    assert not np.array_equal(weights(learner)["0.weight"], server[0].weight.detach().numpy())
    update = round_above(client_of(tmp_path, joining="measured"), server)
    assert set(update.deltas) == TRAINED and update.deltas["3.weight"].any()
    learner.apply_round_result()
    np.testing.assert_allclose(
        weights(learner)["0.weight"], server[0].weight.detach().numpy(), atol=1e-6
    )
    closed(learner)


def test_a_head_that_is_solved_for_is_the_federations(tmp_path: Path) -> None:
    learner, server = streamed(tmp_path, guard=BLIND), net(seed=5)
    update = round_above(client_of(tmp_path), server, kept_head="5")
    assert set(update.deltas) == {"3.weight", "3.bias"}
    learner.apply_round_result()
    places = list(learner.classes)
    head = server[5].weight.detach().numpy()[places]
    np.testing.assert_allclose(weights(learner)["5.weight"], head, atol=1e-6)
    closed(learner)


def test_each_sample_passes_below_the_cut_once_and_deleted_ones_go(
    tmp_path: Path, run_below: list[int]
) -> None:
    learner, server = streamed(tmp_path), net(seed=5)
    client = client_of(tmp_path)
    data, _ = asked(client, server, SolveHead, cut=CUT)
    assert decode_head_sums(data, Manifest.of(server)).num_examples == len(learner.store)
    file = tmp_path / "rounds" / "features.db"
    for _ in range(3):
        run_below.clear()
        round_above(client_of(tmp_path), server)
        # What checks take: no sample is new.
        assert sum(run_below) <= 10
    whole = rows_in(file)
    assert whole == len(learner.store)
    # Old ones: what it has not trained on yet, the learner itself holds as well.
    learner.store.delete(learner.store.ids()[:30].tolist())
    round_above(client_of(tmp_path), server)
    assert rows_in(file) == whole - 30
    closed(learner)


def rows_in(file: Path) -> int:
    """Return how many samples' features are in the file."""
    with closing(sqlite3.connect(file)) as opened:
        return int(opened.execute("SELECT count(*) FROM rows").fetchone()[0])


@pytest.mark.parametrize("latent", [None, Latent(1), Latent(2)])
@pytest.mark.parametrize("cut", ["", "5"])
def test_sums_are_over_every_sample_once_in_the_servers_order(
    tmp_path: Path, latent: Latent | None, cut: str
) -> None:
    server = net()
    learner = streamed(tmp_path, model=net(), latent=latent, labels=(2, 0, 1, 7))
    assert learner.classes[:3] != (0, 1, 2)
    before = learner.store.used_bytes
    data, metrics = asked(client_of(tmp_path), server, SolveHead, cut=cut)
    assert "fl_elastic.error" not in metrics, metrics
    found = decode_head_sums(data, Manifest.of(server))
    # The server has no output for 7.
    rows = [(x, y) for x, y in blobs(120, (2, 0, 1, 7)) if y != 7]
    stored = learner.store.sample(10**6)
    assert found.num_examples == int((stored.y != 7).sum())
    assert found.targets[-1].tolist() == [int((stored.y == each).sum()) for each in (0, 1, 2)]
    if found.num_examples == len(rows):
        x = torch.from_numpy(np.stack([x for x, _ in rows]))
        expected = head_sums(server, [(x, torch.tensor([y for _, y in rows]))])
        np.testing.assert_allclose(found.products, expected.products, rtol=2e-3, atol=0.5)
        np.testing.assert_allclose(found.targets, expected.targets, rtol=2e-3, atol=0.2)
    # It was asked, and has trained nothing: the learner goes on as it was.
    assert not learner.apply_round_result() and learner.store.used_bytes == before
    closed(learner)


def test_features_of_the_store_are_what_rounds_train_on(
    tmp_path: Path, run_below: list[int]
) -> None:
    server = net()
    learner = streamed(tmp_path, model=net(), latent=Latent(2), guard=BLIND)
    assert learner.store.sample(1).x[0].shape == (16,)
    own = weights(learner)
    run_below.clear()
    update = round_above(client_of(tmp_path, joining=(0.25,)), with_head(server))
    # The place is tried when the learner is looked at; no sample passes below it.
    assert sum(run_below) <= 4
    assert set(update.deltas) == TRAINED and update.deltas["3.weight"].any()
    assert not (tmp_path / "rounds" / "features.db").exists()
    assert learner.apply_round_result() and not learner.rounds.undone
    now = weights(learner)
    np.testing.assert_array_equal(now["0.weight"], own["0.weight"])
    assert not np.array_equal(now["3.weight"], own["3.weight"])
    # What was stored before is still what it trains on.
    run(learner, blobs(60, seed=3))
    assert len(learner.store.sample(1000, version=learner._classifier.version)) == len(
        learner.store
    )
    closed(learner)


def test_rounds_above_the_place_of_the_features_train_what_is_above_the_cut(tmp_path: Path) -> None:
    learner, server = streamed(tmp_path, model=net(), latent=Latent(2)), net()
    update = round_above(client_of(tmp_path), server, cut="5")
    assert set(update.deltas) == {"5.weight", "5.bias"}
    accuracy = client_of(tmp_path).evaluate(
        packed(server), {PACKED: True, **Train(cut="5").to_config()}
    )[2]
    assert 0 <= accuracy["accuracy"] <= 1
    closed(learner)


def test_what_would_change_the_features_is_refused_with_a_sentence(tmp_path: Path) -> None:
    learner = streamed(tmp_path, model=net(), latent=Latent(1))
    same, other = net(), net(seed=5)
    client = client_of(tmp_path)
    assert "give the fleet a cut there" in refusal(client, same)
    assert "trains down to '3', and the learner keeps features at" in refusal(client, same, cut="3")
    assert "'0.weight' differs" in refusal(client, other, cut="5")
    assert "'0.weight' differs" in refusal(client, other, kind=SolveHead)
    assert round_above(client, same, cut="5").deltas
    closed(learner)


def test_a_round_that_changed_what_is_below_is_not_taken_up(tmp_path: Path) -> None:
    """Whoever left it: a client of an earlier version, or another one's folder."""
    learner: StreamLearner = streamed(tmp_path, model=net(), latent=Latent(1), guard=BLIND)
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    other = streamed(inputs, model=net())
    client_of(inputs, joining="replace").fit(packed(net(seed=5)), {PACKED: True})
    closed(other)
    (left,) = inputs.rglob("round.state")
    before = weights(learner)
    place = tmp_path / left.relative_to(inputs)
    place.parent.mkdir(exist_ok=True)
    place.write_bytes(left.read_bytes())
    assert learner.apply_round_result() and learner.rounds.undone
    assert all(np.array_equal(value, before[name]) for name, value in weights(learner).items())
    closed(learner)


def test_a_model_whose_frozen_part_is_another_is_refused(tmp_path: Path) -> None:
    """The weights are those that were saved, the code is not."""

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = net()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x * self.scale)

    learner = streamed(tmp_path, model=Other(), latent=Latent(1))
    file = tmp_path / "learner.state"
    assert round_above(client_of(tmp_path, Other()), Other(), cut="layers.5").deltas
    assert "of another model" in refusal(client_of(tmp_path, net()), net(), cut="5")
    kept = load_state(file)
    assert kept is not None
    save_state(file, replace(kept, classifier=replace(kept.classifier, groups_above=2)))
    assert "the model has frozen part" in refusal(
        client_of(tmp_path, Other()), Other(), cut="layers.5"
    )
    closed(learner)


def test_a_federation_of_streams_and_loaders_from_round_zero_on(tmp_path: Path) -> None:
    """One keeps features in its store, one in a file, one has a loader."""
    server = net()
    for node in (1, 2):
        (tmp_path / str(node)).mkdir()
    learners = [
        streamed(tmp_path / str(node), model=net(), latent=Latent(2) if node == 1 else None)
        for node in (1, 2)
    ]
    x = torch.from_numpy(np.stack([x for x, _ in blobs(64, seed=9)]))
    data = [(x, torch.tensor([y for _, y in blobs(64, seed=9)]))]

    def client_at(node: int) -> ElasticClient:
        if node == 3:
            return ElasticClient(
                net(), data, data, budget=Budget(), policy="full", state_dir=tmp_path / "3"
            )
        return client_of(tmp_path / str(node))

    apps = {n: elastic_client_app(lambda _, n=n: client_at(n)) for n in (1, 2, 3)}
    records: list[Any] = []
    terms = RoundConfig(cut=f"fixed:{CUT}", read="last")
    strategy = PartialUpdates(quiet(nodes=3), config=terms, on_round=records.append)
    result, _ = run_rounds(strategy, apps, arrays_of(server), 2)
    assert [len(each.accepted) for each in records] == [3] * len(records) and len(records) == 4
    found = as_weights(result.arrays)
    for name, before in as_weights(arrays_of(server)).items():
        assert np.array_equal(found[name], before) == (name not in TRAINED)
    load_weights(server, Manifest.of(server), found)
    accuracy = evaluate(server, torch.nn.functional.cross_entropy, data).accuracy
    assert accuracy is not None and accuracy > 0.95
    for learner in learners:
        assert learner.apply_round_result()
        closed(learner)


@pytest.mark.parametrize("latent", [None, Latent(2)])
def test_what_cuts_are_worth_and_what_the_device_can_do(
    tmp_path: Path, latent: Latent | None
) -> None:
    learner = streamed(tmp_path, model=net(), latent=latent)
    client = client_of(tmp_path, policy="elastic")
    _, metrics = asked(client, net(), RateCuts)
    assert "fl_elastic.error" not in metrics, metrics
    places = json.loads(metrics[IMPORTANCE])
    # Below the place of its features it has nothing to train.
    assert "3" in places and ("0" in places) == (latent is None)
    assert client.capabilities(Train(cut=CUT)).num_examples > 0
    assert not learner.apply_round_result()
    closed(learner)
