"""ElasticClient as the NumPyClient it is, and behind both kinds of ClientApp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity
from small_federation import (
    EXAMPLES,
    arrays_of,
    assert_identical,
    build,
    elastic_client,
    legacy_app,
    local_data,
    plain_sgd,
    quiet,
    run,
)
from small_models import conv_net, images, loss_fn
from torch import nn

from fl_elastic import Budget
from fl_elastic.errors import ElasticError, RegistryError, TrainingError, UpdateError
from fl_elastic.flower import ElasticClient, PartialUpdates, RoundRecord, elastic_client_app
from fl_elastic.flower._compat import NumPyClient, bytes_to_ndarray
from fl_elastic.flower.capabilities import Capabilities
from fl_elastic.flower.client_round import ClientRound
from fl_elastic.flower.records import ERROR, PACKED, instruction
from fl_elastic.flower.tasks.describe import Describe
from fl_elastic.flower.tasks.task import config_key
from fl_elastic.flower.tasks.train import Train
from fl_elastic.profiling import CostProfile, profile_model
from fl_elastic.streaming import SampleStore, StreamLearner
from fl_elastic.training import ElasticTrainer, Timing, TrainerOptions
from fl_elastic.update import Manifest, decode, weights_of
from fl_elastic.update.model_wire import encode_weights

RATE = config_key("rate")
PLAIN = (int, float, str, bytes, bool)


@pytest.fixture(scope="module")
def profile() -> CostProfile:
    return profile_model(build(), loss_fn, local_data(4)[0], optimizer_fn=plain_sgd)


def packed_model(model: nn.Module, version: int = 1) -> np.ndarray:
    manifest = Manifest.of(model)
    data = encode_weights(weights_of(model, manifest), manifest, version=version)
    return np.frombuffer(data, dtype=np.uint8)


def context() -> Context:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 1
    return Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})


def replied(app: ClientApp, content: RecordDict, kind: str) -> RecordDict:
    here = context()
    message = Message(content, dst_node_id=1, message_type=kind)
    return app(message, here).content


OPTIONS: dict[str, dict[str, Any]] = {
    "full": {"policy": "full"},
    "head": {"policy": "head"},
    "bias": {"policy": "bias", "codec": "fp16"},
    "elastic": {"policy": "elastic", "budget": Budget(speedup=1.5)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_both_kinds_of_app_reply_with_the_same_bytes(name: str, profile: CostProfile) -> None:
    def client() -> ElasticClient:
        steady = TrainerOptions(seed=3, timing=Timing(closed_loop=False))
        return elastic_client(
            build(), 4, options=steady, profile=profile, client_id="one", **OPTIONS[name]
        )

    content = instruction("train", packed_model(build()).tobytes(), ConfigRecord({"x": 1}))
    legacy = replied(legacy_app(client), content, "train")
    direct = replied(elastic_client_app(lambda _: client()), content, "train")
    assert set(legacy) == set(direct)
    one, other = (each["fitres.parameters"]["0"].data for each in (legacy, direct))
    assert one == other
    assert dict(legacy["fitres.num_examples"]) == dict(direct["fitres.num_examples"])
    assert set(legacy["fitres.metrics"]) == set(direct["fitres.metrics"])
    update = decode(bytes_to_ndarray(one).tobytes(), Manifest.of(build()))
    assert update.deltas
    assert update.num_examples == EXAMPLES[3]
    assert update.base_version == 1


def test_both_kinds_of_app_evaluate_alike() -> None:
    content = instruction("evaluate", packed_model(build(seed=8)).tobytes(), ConfigRecord())
    legacy = replied(legacy_app(lambda: elastic_client(build(), 1)), content, "evaluate")
    app = elastic_client_app(lambda _: elastic_client(build(), 1))
    direct = replied(app, content, "evaluate")
    assert {key: dict(record) for key, record in legacy.items()} == {
        key: dict(record) for key, record in direct.items()
    } | {"evaluateres.status": dict(legacy["evaluateres.status"])}
    assert legacy["evaluateres.num_examples"]["num_examples"] == 12


def test_whichever_process_made_an_app_the_one_that_answers_does_without_the_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Flower hands apps on to other processes; and whoever only imports one is left alone."""
    done: list[str] = []
    monkeypatch.setattr("fl_elastic.flower.app.without_compiler", lambda: done.append("lean"))

    def client_fn(_: Context) -> ElasticClient:
        done.append("client")
        return elastic_client(build(), 1)

    app = elastic_client_app(client_fn)
    assert done == []
    content = instruction("evaluate", packed_model(build(seed=8)).tobytes(), ConfigRecord())
    replied(app, content, "evaluate")
    assert done == ["lean", "client"]


def test_a_mixed_fleet_merges_like_one_of_a_kind() -> None:
    def fleet(message_api: set[int]) -> dict[int, ClientApp]:
        def client(node: int) -> ElasticClient:
            return elastic_client(build(), node, policy="head" if node == 2 else "full")

        return {
            node: elastic_client_app(lambda _, node=node: client(node))
            if node in message_api
            else legacy_app(lambda node=node: client(node))
            for node in range(1, 5)
        }

    records: list[RoundRecord] = []
    strategy = PartialUpdates(quiet(fraction_evaluate=1.0), on_round=records.append)
    mixed, _ = run(strategy, fleet({1, 3}), arrays_of(build()), 2)
    assert not any(record.rejected for record in records)
    of_a_kind, _ = run(
        PartialUpdates(quiet(fraction_evaluate=1.0)), fleet(set()), arrays_of(build()), 2
    )
    assert_identical(mixed.arrays, of_a_kind.arrays)
    assert mixed.evaluate_metrics_clientapp == of_a_kind.evaluate_metrics_clientapp


def test_the_server_may_start_from_a_state_dict() -> None:
    """The way of Flower's own examples; the server then knows its model as arrays only."""
    apps = {node: legacy_app(lambda node=node: elastic_client(build(), node)) for node in (1, 2)}
    records: list[RoundRecord] = []
    strategy = PartialUpdates(quiet(nodes=2), on_round=records.append)
    from_state, _ = run(strategy, apps, ArrayRecord(build().state_dict()))
    assert not records[0].rejected
    from_arrays, _ = run(PartialUpdates(quiet(nodes=2)), apps, arrays_of(build()))
    assert_identical(from_state.arrays, from_arrays.arrays)
    build().load_state_dict(from_state.arrays.to_torch_state_dict())


def test_fit_returns_plain_python() -> None:
    client = elastic_client(build(), 2)
    assert isinstance(client, NumPyClient)
    for arrays, config in (
        ([packed_model(build())], {PACKED: True}),
        (client.get_parameters({}), {}),
    ):
        found = client.fit(arrays, config)
        assert type(found) is tuple
        parameters, examples, metrics = found
        assert type(parameters) is list
        assert all(type(array) is np.ndarray for array in parameters)
        assert type(examples) is int
        assert type(metrics) is dict
        assert metrics
        assert all(type(key) is str and type(value) in PLAIN for key, value in metrics.items())


def test_evaluate_returns_plain_python() -> None:
    client = elastic_client(build(), 2)
    loss, examples, metrics = client.evaluate([packed_model(build())], {PACKED: True})
    assert (type(loss), type(examples)) == (float, int)
    assert {name: type(value) for name, value in metrics.items()} == {"accuracy": float}


def test_no_accuracy_is_told_where_none_was_computed() -> None:
    client = elastic_client(build(), 2)
    client.loss_fn = lambda outputs, _: outputs.square().mean()
    client.test_loader = [(x, torch.rand(len(x))) for x, _ in client.test_loader]
    _, _, metrics = client.evaluate([packed_model(build())], {PACKED: True})
    assert metrics == {}


def test_own_metrics_are_told_beside_accuracy() -> None:
    def share(outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
        return {"first-class": float((outputs.argmax(1) == 0).float().mean() + 0 * len(targets))}

    client = elastic_client(build(), 2, metrics_fn=share)
    _, _, metrics = client.evaluate([packed_model(build())], {PACKED: True})
    assert set(metrics) == {"accuracy", "first-class"}
    assert {type(value) for value in metrics.values()} == {float}


def test_metrics_say_what_was_trained() -> None:
    client = elastic_client(build(), 2, epochs=2)
    _, examples, metrics = client.fit([packed_model(build())], {PACKED: True})
    assert examples == 18
    assert metrics["steps"] == metrics["requested-steps"] == 6
    assert metrics["trained-groups"] == 7
    assert metrics["step-seconds"] > 0
    assert metrics["full-step-seconds"] > 0
    assert metrics["predicted-seconds"] > 0


def test_a_first_fit_is_charged_for_its_estimate_also_where_costs_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made() -> ElasticClient:
        return ElasticClient(
            build(), images(4), images(1), budget=Budget(speedup=2.0), loss_fn=loss_fn,
            optimizer_fn=plain_sgd, state_dir=tmp_path,
        )  # fmt: skip

    # Outside of the fit nobody's budget would know of it.
    with monkeypatch.context() as outside:
        outside.setattr(ClientRound, "costs", None)
        first = made()
        first.fit([packed_model(build())], {PACKED: True})
    later = made()
    kept = ClientRound(later, Train(), later.data).known_profile()
    assert first.report is not None and first.report.selection_seconds > 0
    assert kept is not None and kept.full_step_seconds > 0


def test_the_servers_epochs_override_the_clients() -> None:
    client = elastic_client(build(), 2, epochs=2)
    for asked in (3, 3.0):
        metrics = client.fit([packed_model(build())], {PACKED: True, "local-epochs": asked})[2]
        assert metrics["steps"] == 9


@pytest.mark.parametrize("asked", [None, 3, 3.0])
def test_what_a_round_takes_is_said_for_the_servers_epochs(asked: float | None) -> None:
    """A deadline for a quarter of the fleet would otherwise be a third of what they need."""
    client = elastic_client(build(), 2, epochs=2)
    config = {} if asked is None else {"local-epochs": asked}
    said = client.evaluate([], {**Describe().to_config(), **config})[2]
    trained = client.fit([packed_model(build())], {PACKED: True, **config})[2]
    assert (
        Capabilities.from_metrics(said).steps == trained["requested-steps"] == (9 if asked else 6)
    )


@pytest.mark.parametrize("epochs", [1.5, "many", 0, float("nan")])
def test_a_part_of_an_epoch_is_refused(epochs: Any) -> None:
    client = elastic_client(build(), 2)
    told = client.fit([packed_model(build())], {PACKED: True, "local-epochs": epochs})[2]
    assert f"epochs {epochs!r} must be a whole number" in told[ERROR]


def test_a_plain_list_comes_back_as_a_plain_list() -> None:
    sent = list(weights_of(build(seed=8), Manifest.of(build())).values())
    client = elastic_client(build(seed=7), 2, policy="head")
    arrays, examples, _ = client.fit([array.copy() for array in sent], {})
    assert examples == 18
    assert [array.shape for array in arrays] == [array.shape for array in sent]
    assert [array.dtype for array in arrays] == [array.dtype for array in sent]
    changed = [not np.array_equal(one, other) for one, other in zip(arrays, sent, strict=True)]
    assert changed == [name.startswith("11.") for name in client.manifest.names]


def test_dense_and_packed_replies_say_the_same() -> None:
    start = weights_of(build(seed=8), Manifest.of(build()))
    dense = elastic_client(build(), 3).fit(list(start.values()), {})[0]
    packed = elastic_client(build(), 3).fit([packed_model(build(seed=8))], {PACKED: True})[0]
    update = decode(packed[0].tobytes(), Manifest.of(build()))
    for (name, base), array in zip(start.items(), dense, strict=True):
        if name.endswith("num_batches_tracked"):
            assert name not in update.deltas
        else:
            np.testing.assert_allclose(base + update.deltas[name], array, rtol=1e-6, atol=1e-7)


def test_parameters_are_all_tensors_in_the_manifests_order() -> None:
    client = elastic_client(build(), 1)
    state = build().state_dict()
    arrays = client.get_parameters({})
    assert tuple(state) == client.manifest.names
    for tensor, array in zip(state.values(), arrays, strict=True):
        assert array.tobytes() == tensor.numpy().tobytes()


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ([], "expected one packed buffer, got 0 arrays"),
        ([np.zeros(3, np.uint8)] * 2, "expected one packed buffer, got 2 arrays"),
        ([np.zeros(90, np.uint8)], "does not start with the mark"),
        ([packed_model(build(norm="none"))], "whose tensors have other names, shapes or dtypes"),
        ([packed_model(build().double())], "with the same tensors in float64 and not in float32"),
    ],
)
def test_a_model_that_does_not_fit_is_reported_to_the_server(
    arrays: list[np.ndarray], reason: str
) -> None:
    client = elastic_client(build(), 1)
    before = client.get_parameters({})
    parameters, examples, metrics = client.fit(arrays, {PACKED: True})
    assert (parameters, examples) == ([], 0)
    assert reason in metrics[ERROR]
    assert client.evaluate(arrays, {PACKED: True})[1] == 0
    assert reason in client.evaluate(arrays, {PACKED: True})[2][ERROR]
    assert all(
        np.array_equal(one, other)
        for one, other in zip(before, client.get_parameters({}), strict=True)
    )


def test_without_packed_updates_failures_are_raised() -> None:
    client = elastic_client(build(), 1)
    with pytest.raises(UpdateError, match="got 1 arrays, the model has"):
        client.fit([np.zeros(3)], {})
    with pytest.raises(UpdateError, match="has shape"):
        client.evaluate([np.zeros(3) for _ in client.manifest.names], {})
    client.train_loader = []
    with pytest.raises(TrainingError, match="gave no batch"):
        client.fit(client.get_parameters({}), {})


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_a_server_that_speaks_otherwise_gets_a_hint(kind: str) -> None:
    strange = RecordDict({"one": arrays_of(build()), "other": arrays_of(build())})
    app = elastic_client_app(lambda _: elastic_client(build(), 1))
    with pytest.raises(UpdateError, match="PartialUpdates") as refused:
        replied(app, strange, kind)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "options", [{"policy": "elastik"}, {"codec": "fp23"}], ids=["policy", "codec"]
)
def test_unknown_names_are_refused_before_anything_is_trained(options: dict[str, str]) -> None:
    with pytest.raises(RegistryError, match="did you mean"):
        ElasticClient(build(), local_data(1), images(1), budget=Budget(), **options)


def test_each_round_starts_from_the_servers_model() -> None:
    """What the client's model was before does not matter."""
    fresh = elastic_client(build(seed=7), 2).fit([packed_model(build(seed=8))], {PACKED: True})[0]
    used = elastic_client(build(seed=9), 2)
    used.fit([packed_model(build(seed=9))], {PACKED: True})
    assert (
        used.fit([packed_model(build(seed=8))], {PACKED: True})[0][0].tobytes()
        == fresh[0].tobytes()
    )


def rates_of(configure: Any = None, **config: Any) -> list[dict[str, Any]]:
    """What the optimiser of a round ended with, where its head has ten times the rate of the rest."""
    made: list[torch.optim.Optimizer] = []

    def optimizer_fn(named_parameters: Any) -> torch.optim.Optimizer:
        pairs = list(named_parameters)
        head = [pair for pair in pairs if pair[0].startswith("11.")]
        rest = [pair for pair in pairs if not pair[0].startswith("11.")]
        groups = [{"params": rest}, {"params": head, "lr": 0.1}]
        made.append(torch.optim.SGD(groups, lr=0.01))
        return made[-1]

    client = ElasticClient(
        conv_net(), images(2), images(1), budget=Budget(), policy="full", loss_fn=loss_fn,
        optimizer_fn=optimizer_fn, configure=configure,
    )  # fmt: skip
    client.fit(client.get_parameters({}), config)
    return made[-1].param_groups


def test_the_servers_rate_reaches_the_optimizer_and_groups_keep_their_ratio() -> None:
    assert [each["lr"] for each in rates_of()] == [0.01, 0.1]
    assert [each["lr"] for each in rates_of(lr=0.002)] == pytest.approx([0.002, 0.02])
    # The server's brake is on top of what it says otherwise.
    slowed = rates_of(lr=0.002, **{RATE: 0.25})
    assert [each["lr"] for each in slowed] == pytest.approx([0.0005, 0.005])


@pytest.mark.parametrize("rates", [(0.1,), (0.1, 0.01)])
def test_the_servers_rate_replaces_that_of_groups_that_all_name_their_own(
    rates: tuple[float, ...],
) -> None:
    """The rate that torch's SGD has for groups without one is nobody's."""
    made: list[torch.optim.Optimizer] = []

    def optimizer_fn(parameters: Any) -> torch.optim.Optimizer:
        every = list(parameters)
        parts = [every] if len(rates) == 1 else [every[:2], every[2:]]
        groups = [{"params": part, "lr": lr} for part, lr in zip(parts, rates, strict=True)]
        made.append(torch.optim.SGD(groups))
        return made[-1]

    client = ElasticClient(
        conv_net(), images(2), images(1), budget=Budget(), policy="full", loss_fn=loss_fn,
        optimizer_fn=optimizer_fn,
    )  # fmt: skip
    client.fit(client.get_parameters({}), {"lr": 0.05})
    found = [each["lr"] for each in made[-1].param_groups]
    assert found == pytest.approx([0.05 * each / 0.1 for each in rates])


def test_whatever_else_the_server_says_is_for_the_hook_of_the_client() -> None:
    def configure(optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> None:
        for group in optimizer.param_groups:
            group["weight_decay"] = config["weight-decay"]
            group["lr"] *= 0.5 ** config["server-round"]

    found = rates_of(configure, **{"weight-decay": 0.02, "server-round": 2, "lr": 0.04})
    assert [each["weight_decay"] for each in found] == [0.02, 0.02]
    assert [each["lr"] for each in found] == pytest.approx([0.01, 0.1])


@pytest.mark.parametrize("rate", [-0.1, "fast", float("nan"), True])
def test_a_rate_that_is_none_is_refused(rate: Any) -> None:
    with pytest.raises(UpdateError, match="lr"):
        rates_of(lr=rate)


def test_rates_and_words_of_a_servers_train_config_reach_every_client() -> None:
    seen: list[tuple[float, str]] = []

    def configure(optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> None:
        seen.append((optimizer.param_groups[0]["lr"], str(config.get("mood"))))

    apps = {
        node: legacy_app(lambda node=node: elastic_client(build(), node, configure=configure))
        for node in (1, 2)
    }
    strategy = PartialUpdates(quiet(nodes=2))
    config = ConfigRecord({"lr": 0.0125, "mood": "calm"})
    run(strategy, apps, arrays_of(build()), 1, train_config=config)
    assert len(seen) >= 2 and set(seen) == {(0.0125, "calm")}


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"budget": 2}, r"budget 2 is a int, not a Budget: say for example Budget\(speedup=2\.0\)"),
        ({"budget": Budget}, "is a type, not a Budget"),
        ({"model": nn.Identity}, r"model Identity is not a torch module but a class: give Identity\(\.\.\.\)"),
        ({"model": "resnet18"}, "model of type str is not a torch module"),
        ({"optimizer_fn": plain_sgd(nn.Linear(1, 1).parameters())}, "optimizer_fn of type SGD cannot be called"),
        ({"loss_fn": "cross_entropy"}, "loss_fn of type str cannot be called: give a function"),
        ({"loss_fn": nn.CrossEntropyLoss}, r"loss_fn CrossEntropyLoss is no function but a class: give Cross"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["client", "trainer", "learner"])
def test_what_is_of_another_kind_is_refused_when_it_is_given(
    kind: str, odd: dict[str, Any], words: str, tmp_path: Path
) -> None:
    given = {
        "model": build(), "budget": Budget(), "loss_fn": loss_fn, "optimizer_fn": plain_sgd, **odd
    }  # fmt: skip
    model = given.pop("model")
    with pytest.raises(ElasticError, match=words) as error:
        if kind == "client":
            ElasticClient(model, [], [], **given)
        elif kind == "trainer":
            ElasticTrainer(model, **given)
        else:
            with SampleStore(tmp_path / "samples.db", 2**20) as store:
                StreamLearner(model, store, state_dir=tmp_path, detector="none", **given)
    assert len(str(error.value).splitlines()) == 1


def test_client_and_trainer_need_a_budget() -> None:
    """A learner does not: each of its adaptations is of so many steps."""
    parts: Any = {"budget": None, "loss_fn": loss_fn, "optimizer_fn": plain_sgd}
    with pytest.raises(ElasticError, match="budget None is a NoneType"):
        ElasticClient(build(), [], [], **parts)
    with pytest.raises(ElasticError, match="budget None is a NoneType"):
        ElasticTrainer(build(), **parts)


def test_a_deadline_that_has_passed_is_named_as_it_was_given() -> None:
    client = elastic_client(build(), 1, budget=Budget(deadline=1e-6))
    told = client.fit([packed_model(build())], {PACKED: True})[2]
    assert "deadline 1e-06 s has passed before the first step" in told[ERROR]
