"""A device takes part in rounds from its stream: what it sends, what it keeps, and what reaches its learner."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.serverapp.strategy import FedAvg
from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.errors import StreamError
from fl_elastic.flower.app import elastic_client_app
from fl_elastic.flower.records import ERROR, PACKED, as_record
from fl_elastic.flower.strategy import PartialUpdates
from fl_elastic.flower.stream_client import StreamClient
from fl_elastic.flower.tasks.cut_worth import RateCuts
from fl_elastic.flower.tasks.forgetting import MeasureLoss, SumSquaredGradients
from fl_elastic.flower.tasks.solve_head import SolveHead
from fl_elastic.flower.tasks.task import RoundTask, config_key
from fl_elastic.losses import classification_loss, squared_outputs
from fl_elastic.methods.dampening.forget import squared_gradients
from fl_elastic.streaming import Guard, Latent, Replay, StreamLearner
from fl_elastic.streaming.round_inbox import RoundInbox
from fl_elastic.streaming.saved_learner import StreamPosition
from fl_elastic.training import evaluate
from fl_elastic.update import Manifest, PartialUpdate, decode, weights_of
from fl_elastic.update.dampening import decode_squares
from fl_elastic.update.model_wire import encode_weights
from fl_elastic_simulations.engine.in_process_grid import InProcessGrid

sys.path.append(str(Path(__file__).parents[1] / "streaming"))
from toy_streams import adam, blobs, closed, learner_in, net, run, weights

RATE = config_key("rate")


class Blind(Guard):
    """Accepts everything that is finite."""

    tolerance, loss_tolerance = 1.0, 1e9


BLIND = Blind()


class Normed(nn.Module):
    """A network with running statistics."""

    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(6, 16), nn.BatchNorm1d(16)
        self.head = nn.Linear(16, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.body(x))))


def streamed(
    folder: Path, labels: tuple[int, ...] = (0, 1, 2), count: int = 120, **settings: Any
) -> StreamLearner:
    """A learner that has seen some samples, and has saved its state."""
    learner = learner_in(folder, **settings)
    run(learner, blobs(count, labels))
    learner.save()
    return learner


def client_of(folder: Path, model: nn.Module | None = None, **settings: Any) -> StreamClient:
    given: dict[str, Any] = {"budget": Budget(), "policy": "full", "optimizer_fn": adam}
    return StreamClient(model or net(), folder, **(given | settings))


def packed(model: nn.Module, version: int = 3) -> list[Any]:
    """A global model on its way."""
    manifest = Manifest.of(model)
    data = encode_weights(weights_of(model, manifest), manifest, version=version)
    return [np.frombuffer(data, np.uint8)]


def round_of(client: StreamClient, model: nn.Module) -> tuple[PartialUpdate, dict[str, Any]]:
    arrays, _, metrics = client.fit(packed(model), {PACKED: True})
    assert "fl_elastic.error" not in metrics, metrics
    return decode(arrays[0].tobytes(), Manifest.of(model)), metrics


def test_what_is_sent_is_the_joined_and_trained_model_and_the_learner_goes_on_with_it(
    tmp_path: Path,
) -> None:
    learner, server = streamed(tmp_path), net(seed=5)
    assert learner.classes != (0, 1, 2), "rows must be in another order than the server's"
    before = weights(learner)
    client = client_of(tmp_path, joining=(0.25,))
    update, _ = round_of(client, server)
    assert update.base_version == 3 and set(update.deltas) == set(before)
    assert learner.apply_round_result() and learner.rounds.taken == 1 and not learner.rounds.undone
    now, places = weights(learner), list(learner.classes)
    for name, base in weights_of(server, Manifest.of(server)).items():
        in_order = places if name.startswith("5.") else ...
        joined = 0.75 * before[name] + 0.25 * base[in_order]
        trained = (base + update.deltas[name])[in_order]
        # Of the training the learner gets what its own share in the joined model was.
        np.testing.assert_allclose(
            now[name], joined + 0.75 * (trained - joined), rtol=1e-5, atol=1e-5
        )
    assert not learner.apply_round_result(), "once is enough"
    closed(learner)


@pytest.mark.parametrize(("count", "steps"), [(60, 20), (90, 20), (90, 1)])
def test_a_stream_counts_by_its_samples_not_by_how_often_they_are_drawn(
    tmp_path: Path, count: int, steps: int
) -> None:
    learner, server = streamed(tmp_path, count=count), net(seed=5)
    learner.observe(np.zeros(6, np.float32))
    learner.save()
    update, _ = round_of(client_of(tmp_path, steps=steps), server)
    # All but the held-out ones are in the store, and beside them one without a label.
    kept = len(learner.store) - 1
    assert 40 < kept <= count
    assert update.num_examples == min(kept, 32 * steps)
    closed(learner)


def test_classes_that_only_one_side_knows_are_kept_on_both(tmp_path: Path) -> None:
    # The device has met 6 and 0, the server's outputs stand for 0, 1 and 2.
    learner = streamed(tmp_path, labels=(0, 6), model=net(2), guard=BLIND)
    server = net(3, seed=5)
    assert set(learner.classes) == {0, 6}
    own = weights(learner)["5.weight"][learner.classes.index(6)].copy()
    still = {"optimizer_fn": lambda parameters: torch.optim.SGD(parameters, lr=0.0)}
    update, _ = round_of(client_of(tmp_path, net(3), joining="replace", **still), server)
    assert update.deltas["5.weight"].shape == (3, 16)
    assert all(not delta.any() for delta in update.deltas.values())
    learner.apply_round_result()
    assert set(learner.classes) == {0, 1, 2, 6} and not learner.rounds.undone
    rows = weights(learner)["5.weight"]
    assert np.array_equal(rows[learner.classes.index(6)], own)
    theirs = server.state_dict()["5.weight"].numpy()
    for label in (0, 1, 2):
        np.testing.assert_allclose(rows[learner.classes.index(label)], theirs[label], atol=1e-6)
    run(learner, blobs(60, (0, 6), seed=4))
    closed(learner)


def test_samples_of_a_class_that_the_server_does_not_know_are_learned_all_the_same(
    tmp_path: Path,
) -> None:
    learner = streamed(tmp_path, labels=(0, 1, 2, 6), model=net(3))
    before = weights(learner)["5.weight"][learner.classes.index(6)].copy()
    update, _ = round_of(client_of(tmp_path, net(3)), net(3, seed=5))
    assert update.deltas["5.bias"].shape == (3,)
    learner.apply_round_result()
    assert not np.array_equal(weights(learner)["5.weight"][learner.classes.index(6)], before)
    closed(learner)


def test_the_server_is_told_of_the_stream(tmp_path: Path) -> None:
    learner = streamed(tmp_path)
    _, first = round_of(client_of(tmp_path, joining=(0.5,)), net(seed=5))
    assert first["samples-since-round"] == first["labelled-since-round"] == 120
    assert first["drifts-since-round"] == 0 and first["store-bytes"] > 10_000
    assert first["prequential-accuracy"] == pytest.approx(learner.progress.accuracy)
    assert first["joined-share"] == 0.5 and first["plan-share"] == 1.0
    for x, _ in blobs(7, seed=3):
        learner.observe(x)
    run(learner, blobs(5, seed=4))
    learner.progress.drifts += 1
    learner.save()
    _, second = round_of(client_of(tmp_path, joining=(0.75,)), net(seed=5))
    assert second["samples-since-round"] == 12 and second["labelled-since-round"] == 5
    assert second["drifts-since-round"] == 1 and second["joined-share"] == 0.75
    _, third = round_of(client_of(tmp_path, joining=(0.5,)), net(seed=5))
    assert third["samples-since-round"] == 0 and third["drifts-since-round"] == 0
    assert third["joined-share"] == 0.5
    closed(learner)


def test_the_measured_rule_goes_by_samples_that_the_learner_has_not_trained_on(
    tmp_path: Path,
) -> None:
    learner = streamed(tmp_path / "one", count=140, guard=Guard(every=4, size=32))
    other = streamed(tmp_path / "two", count=140)
    _, metrics = round_of(client_of(tmp_path / "one", joining="measured"), net(seed=5))
    assert metrics["joined-share"] == 0.0, "a model that knows nothing"
    # A federation that is far better than a device that has just begun.
    fresh = learner_in(tmp_path / "new", net(seed=9), guard=Guard(every=4, size=32))
    run(fresh, blobs(40))
    fresh.save()
    server = net()
    order = [other.classes.index(label) for label in (0, 1, 2)]
    server.load_state_dict(
        {
            name: torch.from_numpy(each[order] if name.startswith("5.") else each)
            for name, each in weights(other).items()
        }
    )
    _, metrics = round_of(client_of(tmp_path / "new", joining="measured"), server)
    assert metrics["joined-share"] == 1.0
    for each in (learner, other, fresh):
        closed(each)


def test_evaluation_is_of_the_joined_model_on_the_held_out_window(tmp_path: Path) -> None:
    learner, client = streamed(tmp_path, count=200), client_of(tmp_path, joining=(0.0,))
    held = len(learner._memory.held_out)
    loss, examples, metrics = client.evaluate(packed(net(seed=5)), {PACKED: True})
    assert examples == held > 5 and metrics["accuracy"] > 0.8 and loss < 1
    closed(learner)
    empty = streamed(tmp_path / "short", count=5)
    told = client_of(tmp_path / "short").evaluate(packed(net(seed=5)), {PACKED: True})
    assert "no sample is held out yet" in told[2]["fl_elastic.error"]
    closed(empty)


def asked(
    folder: Path, model: nn.Module, task: RoundTask
) -> tuple[bytes, dict[str, Any], list[Any]]:
    """What a client answers to a question, and its samples; the learner's inbox and position are as they were."""
    learner = streamed(folder, labels=(2, 0, 1))
    stored = learner.store.sample(10**6)
    rows = [
        (torch.tensor(x)[None], torch.tensor([y])) for x, y in zip(stored.x, stored.y, strict=True)
    ]
    position = StreamPosition.load(folder)
    arrays, _, metrics = client_of(folder).fit(packed(model), {PACKED: True, **task.to_config()})
    assert ERROR not in metrics, metrics
    assert not learner.apply_round_result() and learner.rounds.taken == 0
    assert RoundInbox(folder).claim() is None and StreamPosition.load(folder) == position
    closed(learner)
    return arrays[0].tobytes(), metrics, rows


@pytest.mark.parametrize("task", [SolveHead(), RateCuts()])
def test_a_question_is_no_training(tmp_path: Path, task: RoundTask) -> None:
    asked(tmp_path, net(seed=5), task)


def test_squares_are_those_of_the_servers_model_over_every_sample(tmp_path: Path) -> None:
    server = net(seed=5)
    data, _, rows = asked(tmp_path, server, SumSquaredGradients())
    found, _ = decode_squares(data, Manifest.of(server))
    assert found.examples == len(rows)
    expected = squared_gradients(server, squared_outputs, rows)
    for name, squares in expected.sums.items():
        np.testing.assert_allclose(found.sums[name], squares, rtol=1e-2, atol=1e-3)


def test_losses_are_those_of_the_servers_model_over_every_sample(tmp_path: Path) -> None:
    server = net(seed=5)
    _, metrics, rows = asked(tmp_path, server, MeasureLoss())
    expected = evaluate(server, classification_loss, rows)
    assert metrics["train-loss"] == pytest.approx(expected.loss, rel=1e-2)


@pytest.mark.parametrize("replay", [Replay(), Replay(8, stored_share=0.0)])
def test_every_replay_takes_part(tmp_path: Path, replay: Replay) -> None:
    learner = streamed(tmp_path, replay=replay)
    update, _ = round_of(client_of(tmp_path, replay=replay, steps=7), net(seed=5))
    assert set(update.steps.values()) == {7}
    assert client_of(tmp_path, replay=replay).capabilities().steps == 20
    closed(learner)


def test_a_device_without_a_stream_says_so(tmp_path: Path) -> None:
    def why(folder: Path) -> str:
        return str(client_of(folder).fit(packed(net()), {PACKED: True})[2]["fl_elastic.error"])

    assert "nothing was learned" in why(tmp_path / "nowhere")
    silent = learner_in(tmp_path / "silent")
    for x, _ in blobs(5):
        silent.observe(x)
    silent.save()
    assert "no labelled sample" in why(tmp_path / "silent")
    closed(silent)
    latent = streamed(tmp_path / "latent", latent=Latent(1), encoding="int8")
    assert "without latent replay" in why(tmp_path / "latent")
    closed(latent)
    other = streamed(tmp_path / "other", model=Normed())
    assert "another model" in why(tmp_path / "other")
    closed(other)


def test_settings_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    for wrong in ({"steps": 0}, {"classes": (1, 1, 2)}, {"classes": range(4)}):
        with pytest.raises(StreamError):
            client_of(tmp_path, **wrong)


@pytest.mark.slow
def test_devices_with_other_classes_each_learn_all_of_them_together(tmp_path: Path) -> None:
    seen = [(0, 1), (1, 2), (2, 0)]
    learners = [learner_in(tmp_path / str(n), net()) for n in range(3)]
    rounds = [0, 0, 0]

    def client(number: int) -> StreamClient:
        run(learners[number], blobs(40, seen[number], seed=100 * number + rounds[number]))
        rounds[number] += 1
        learners[number].save()
        return client_of(tmp_path / str(number), joining="replace", steps=5)

    start = weights_of(net(), Manifest.of(net()))
    app = elastic_client_app(lambda context: client(int(context.node_config["partition-id"])))
    final = PartialUpdates(FedAvg(fraction_evaluate=0.0, min_available_nodes=3)).start(
        grid=InProcessGrid(3, app), initial_arrays=as_record(start), num_rounds=6
    )
    model = net()
    model.load_state_dict(final.arrays.to_torch_state_dict())
    test = blobs(300, (0, 1, 2), seed=77)
    with torch.no_grad():
        said = model(torch.from_numpy(np.stack([x for x, _ in test]))).argmax(1).numpy()
    assert (said == np.array([y for _, y in test])).mean() > 0.8
    for learner in learners:
        assert learner.rounds.taken >= 5 and set(learner.classes) == {0, 1, 2}
        closed(learner)


def test_the_servers_rate_and_its_brake_reach_the_optimizer_of_a_stream(tmp_path: Path) -> None:
    streamed(tmp_path)
    seen: list[float] = []

    def configure(optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> None:
        assert config["lr"] == 0.04
        seen.append(optimizer.param_groups[0]["lr"])

    def moved(**config: Any) -> float:
        client = client_of(
            tmp_path, optimizer_fn=lambda p: torch.optim.SGD(p, lr=0.5), steps=1,
            joining="replace", configure=configure,
        )  # fmt: skip
        arrays, _, metrics = client.fit(packed(net(seed=5)), {PACKED: True, **config})
        assert ERROR not in metrics, metrics
        update = decode(arrays[0].tobytes(), Manifest.of(net()))
        return float(sum(np.abs(delta).sum() for delta in update.deltas.values()))

    usual, slowed = moved(lr=0.04), moved(**{"lr": 0.04, RATE: 0.25})
    assert seen and set(seen) == {0.04}
    # Other samples are drawn in the second round; the brake is far longer than that.
    assert 0 < slowed < usual / 2
