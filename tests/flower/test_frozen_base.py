"""A federation of adapters: the frozen base stays where it is, both ways, in every round and on every disk."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters import adapted, base_of, tokens, trained_bytes
from flwr.serverapp.strategy import FedAdam, FedAvg
from small_federation import DenseLists, as_record, as_weights, legacy_app, quiet, run
from torch import nn

from fl_elastic import Budget
from fl_elastic.aggregation import ModelAverage
from fl_elastic.errors import CheckpointError, UpdateError
from fl_elastic.flower import (
    Checkpointed,
    ElasticClient,
    PartialUpdates,
    RoundConfig,
    elastic_client_app,
    initial_arrays,
)
from fl_elastic.flower.records import PACKED
from fl_elastic.model_export import export_model
from fl_elastic.update import Manifest, load_weights, weights_of
from fl_elastic.update.manifest import FROZEN_BASE

NODES = range(1, 5)
# Of a header, and what JSON says of each tensor.
HEADER = 400
Build = Callable[[], nn.Module]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3)


def client(model: nn.Module, node: int, **options: Any) -> ElasticClient:
    settings = {"budget": Budget(), "policy": "full", "optimizer_fn": sgd} | options
    return ElasticClient(model, tokens(node), tokens(9), **settings)


def apps_of(
    models: dict[int, nn.Module], folder: Path | None = None, **options: Any
) -> dict[int, Any]:
    def client_of(node: int) -> ElasticClient:
        state = {} if folder is None else {"state_dir": folder / str(node)}
        return client(models[node], node, **state, **options)

    return {n: elastic_client_app(lambda _, n=n: client_of(n)) for n in models}


def four(build: Build = adapted) -> dict[int, nn.Module]:
    return {node: build() for node in NODES}


def test_the_base_does_not_travel_and_stays_as_it_is() -> None:
    models, records = four(), []
    before = {node: base_of(model) for node, model in models.items()}
    strategy = PartialUpdates(quiet(), on_round=records.append)
    result, grid = run(strategy, apps_of(models), initial_arrays(adapted()), 3)
    most = trained_bytes(adapted()) + HEADER
    assert most < sum(4 * each.numel() for each in adapted().parameters())
    for record in records:
        assert len(record.accepted) == 4 and not record.rejected
        assert record.downlink_bytes <= most
        assert all(each.uplink_bytes <= most for each in record.accepted)
    for message in grid.sent:
        (arrays,) = message.content.array_records.values()
        assert sum(len(array.data) for array in arrays.values()) <= most + HEADER
    found = as_weights(result.arrays)
    assert list(found) == [*Manifest.of(adapted()).names, FROZEN_BASE]
    start = weights_of(adapted(), Manifest.of(adapted()))
    assert all(not np.array_equal(found[n], start[n]) for n in Manifest.of(adapted()).names)
    for node, model in models.items():
        after = base_of(model)
        assert all(torch.equal(after[name], each) for name, each in before[node].items())
    # The server's model takes them, and another base does not.
    load_weights(adapted(), Manifest.of(adapted()), found)
    with pytest.raises(UpdateError, match="frozen base of the model differs"):
        load_weights(adapted(seed=6), Manifest.of(adapted()), found)


def test_a_client_with_another_base_is_refused_before_it_trains(
    caplog: pytest.LogCaptureFixture,
) -> None:
    models, records = four(), []
    with torch.no_grad():
        models[3].head.weight[0, 0] += 1e-3  # type: ignore[union-attr, index, operator]
    before = {n: each.clone() for n, each in models[3].state_dict().items()}
    strategy = PartialUpdates(quiet(), on_round=records.append)
    run(strategy, apps_of(models), initial_arrays(adapted()), 2)
    for record in records:
        assert {each.node_id for each in record.accepted} == {1, 2, 4}
        (refused,) = record.rejected
        assert refused.node_id == 3
        assert "client could not train: the frozen base of the model differs" in refused.reason
        assert "Load the same pretrained weights" in refused.reason
    assert all(torch.equal(models[3].state_dict()[n], each) for n, each in before.items())


def test_an_a_that_is_frozen_is_part_of_the_base() -> None:
    """All begin from the same one, or are told."""
    models = four(lambda: adapted(fixed_a=True))
    records: list[Any] = []
    torch.manual_seed(0)
    nn.init.normal_(models[2].blocks[0].lora_A.weight)  # type: ignore[union-attr, index, operator]
    strategy = PartialUpdates(quiet(), on_round=records.append)
    run(strategy, apps_of(models), initial_arrays(adapted(fixed_a=True)))
    assert [each.node_id for each in records[0].rejected] == [2]
    assert all("lora_A" not in name for each in records[0].accepted for name in each.steps)


def test_a_server_without_the_digest_trains_and_clients_say_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    start = {n: p.detach().numpy() for n, p in adapted().named_parameters() if p.requires_grad}
    records: list[Any] = []
    run(PartialUpdates(quiet(), on_round=records.append), apps_of(four()), as_record(start))
    assert len(records[0].accepted) == 4
    assert "the server does not say which frozen base its model has" in caplog.text


@pytest.mark.parametrize("arrays", [
    lambda: as_record({n: each.numpy() for n, each in adapted().state_dict().items()}),
    lambda: initial_arrays(adapted(), whole=True),
], ids=["state", "whole"])  # fmt: skip
def test_clients_follow_a_server_that_holds_the_whole_model(
    arrays: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It costs its bytes, and gives devices a base that they do not have."""
    models = four(lambda: adapted(seed=77))
    records: list[Any] = []
    terms = RoundConfig(delta_downlink=True)
    strategy = PartialUpdates(quiet(), config=terms, on_round=records.append)
    result, _ = run(strategy, apps_of(models, tmp_path), arrays(), 2)
    assert [len(each.accepted) for each in records] == [4, 4]
    assert "the server sends the frozen part of the model as well, 11 of 19 tensors" in caplog.text
    expected, _ = run(PartialUpdates(quiet()), apps_of(four()), initial_arrays(adapted()), 2)
    found = as_weights(result.arrays)
    assert list(found) == list(adapted().state_dict())
    for name, each in as_weights(expected.arrays).items():
        assert name == FROZEN_BASE or np.array_equal(found[name], each)
    for name, each in base_of(adapted()).items():
        assert np.array_equal(found[name], each.numpy())
    # What travels afterwards is what changed.
    assert records[1].accepted[0].downlink_bytes < records[0].accepted[0].downlink_bytes / 2


def test_a_client_keeps_the_adapters_and_is_sent_what_changed(tmp_path: Path) -> None:
    records: list[Any] = []
    terms = RoundConfig(cut="fixed:blocks.2")
    strategy = PartialUpdates(quiet(), config=terms, on_round=records.append)
    result, _ = run(strategy, apps_of(four(), tmp_path), initial_arrays(adapted()), 3)
    kept = [path.stat().st_size for path in tmp_path.rglob("model-*.bin")]
    assert len(kept) == 4 and max(kept) < trained_bytes(adapted()) + 6000
    start, found = initial_arrays(adapted()), as_weights(result.arrays)
    for name, each in as_weights(start).items():
        above = name.startswith(("blocks.2", "blocks.3"))
        assert np.array_equal(found[name], each) != above
    above_bytes = trained_bytes(adapted()) // 2
    for record in records[1:]:
        assert len(record.accepted) == 4
        assert all(each.downlink_bytes <= above_bytes + HEADER for each in record.accepted)
        assert all(each.uplink_bytes <= above_bytes + HEADER for each in record.accepted)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [FedAvg, FedAdam])
def test_a_checkpoint_holds_the_adapters_and_knows_the_base(
    tmp_path: Path, kind: type[FedAvg]
) -> None:
    def strategy() -> Checkpointed:
        average = ModelAverage(0.5) if kind is FedAvg else None
        return Checkpointed(PartialUpdates(quiet(kind), average=average), tmp_path)

    tested: list[Any] = []

    def evaluate(number: int, arrays: Any) -> None:
        tested.append(arrays)
        load_weights(adapted(), Manifest.of(adapted()), as_weights(arrays))

    run(strategy(), apps_of(four()), initial_arrays(adapted()), 2)
    models = 5 * trained_bytes(adapted())
    assert all(path.stat().st_size < models + 20_000 for path in tmp_path.glob("round-*"))
    result, _ = run(strategy(), apps_of(four()), initial_arrays(adapted()), 3, evaluate_fn=evaluate)
    straight, _ = run(
        PartialUpdates(quiet(kind), average=ModelAverage(0.5) if kind is FedAvg else None),
        apps_of(four()), initial_arrays(adapted()), 3,
    )  # fmt: skip
    assert all(FROZEN_BASE in each for each in [*tested, result.arrays, straight.arrays])
    for name, each in as_weights(straight.arrays).items():
        assert np.array_equal(as_weights(result.arrays)[name], each)
    with pytest.raises(CheckpointError, match="another frozen base"):
        run(strategy(), apps_of(four()), initial_arrays(adapted(seed=6)), 3)


def test_lists_of_stock_strategies_hold_the_adapters_or_all() -> None:
    names = Manifest.of(adapted()).names
    one = client(adapted(), 1)
    lists = one.get_parameters({})
    assert len(lists) == len(names) < len(adapted().state_dict())
    found, examples, _ = one.fit(lists, {})
    assert len(found) == len(names) and examples == 18
    state = {n: each.numpy() for n, each in adapted().state_dict().items()}
    whole, _, _ = client(adapted(seed=8), 1).fit(list(state.values()), {})
    assert len(whole) == len(state)
    for name, each in zip(names, found, strict=True):
        assert np.array_equal(each, dict(zip(state, whole, strict=True))[name])
    with pytest.raises(UpdateError, match="got 3 arrays, the model has 8 tensors"):
        client(adapted(), 1).fit(lists[:3], {})
    # What a server's `weights_of` gives ends with the digest.
    told = [*weights_of(adapted(), Manifest.of(adapted())).values()]
    again, _, _ = client(adapted(), 1).fit(told, {})
    assert all(np.array_equal(one, other) for one, other in zip(again, found, strict=True))
    with pytest.raises(UpdateError, match="frozen base of the model differs"):
        client(adapted(seed=6), 1).fit(told, {})
    with pytest.raises(UpdateError, match="expected 16 bytes"):
        client(adapted(), 1).fit([*lists, np.zeros(2)], {})
    # In rounds, and as packed updates have it.
    start = as_record(dict(zip(names, lists, strict=True)))
    apps = {n: legacy_app(lambda n=n: client(adapted(), n)) for n in NODES}
    dense, _ = run(DenseLists(quiet()), apps, start, 2)
    packed, _ = run(PartialUpdates(quiet()), apps_of(four()), initial_arrays(adapted()), 2)
    for name, each in as_weights(dense.arrays).items():
        np.testing.assert_allclose(as_weights(packed.arrays)[name], each, rtol=1e-5, atol=1e-7)


def with_free_head(frozen: str) -> nn.Module:
    """The head is trained but for one of its tensors."""
    model = adapted()
    model.head = nn.Linear(model.head.in_features, model.head.out_features)  # type: ignore[union-attr, arg-type]
    nn.init.ones_(model.head.bias)
    model.get_parameter(f"head.{frozen}").requires_grad_(False)
    return model


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_head_in_closed_form_needs_a_head_that_may_change(frozen: str) -> None:
    """Beside a bias that stays, the server would solve for a weight as of a head without one."""
    records: list[Any] = []
    strategy = PartialUpdates(quiet(), config=RoundConfig(read="last"), on_round=records.append)
    fleet = apps_of(four(lambda: with_free_head(frozen)))
    run(strategy, fleet, initial_arrays(with_free_head(frozen)))
    zero = records[0]
    assert zero.server_round == 0 and len(zero.rejected) == 4
    reason = f"'head.{frozen}' of the head belongs to the model's frozen base"
    assert reason in zero.rejected[0].reason


def test_an_exported_model_holds_the_base_as_well(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    from safetensors.numpy import load_file

    trained = adapted()
    nn.init.ones_(trained.blocks[0].lora_B.weight)  # type: ignore[union-attr, index, arg-type]
    weights = weights_of(trained, Manifest.of(trained))
    for given in (weights, weights_of(trained, Manifest.of(trained, whole=True))):
        path = export_model(adapted(), given, tmp_path / "m.safetensors", tokens(1)[0][0])
        found = load_file(path)
        for name, each in trained.state_dict().items():
            assert np.array_equal(found[name], each.numpy())


def test_a_refused_client_says_it_in_its_metrics() -> None:
    other = client(adapted(seed=6), 1)
    server = Manifest.of(adapted()).with_base(adapted())
    from fl_elastic.update.model_wire import encode_weights

    packed = encode_weights(weights_of(adapted(), server), server, version=1)
    given = [np.frombuffer(packed, np.uint8)]
    _, examples, metrics = other.fit(given, {PACKED: True})
    assert examples == 0 and "frozen base" in metrics["fl_elastic.error"]
    assert other.report is None
    assert "frozen base" in other.evaluate(given, {PACKED: True})[2]["fl_elastic.error"]
    logging.getLogger("fl_elastic").info("done")
