"""The care of a device around anybody's client: journal, battery, drift, deadline, state and errors."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp.strategy import FedAvg
from in_process_grid import InProcessGrid
from small_federation import elastic_client
from small_models import conv_net

from fl_elastic import Budget
from fl_elastic.devices.power import PowerSupply
from fl_elastic.errors import TrainingError
from fl_elastic.fleet import node_app
from fl_elastic.flower import PartialUpdates
from fl_elastic.flower.client import ElasticClient
from fl_elastic.flower.node_app import JOURNAL
from fl_elastic.flower.round import RoundRecord
from fl_elastic.flower.tasks.task import DEADLINE
from fl_elastic.monitoring import Journal
from fl_elastic.monitoring.journal import read_journal
from fl_elastic.training import FitReport

NODES = 2
MakeClient = Callable[[Context], ElasticClient]


def own_client(context: Context, **options: Any) -> ElasticClient:
    """What a user writes: it knows nothing of the device."""
    torch.manual_seed(7)
    return elastic_client(conv_net("none"), 4, **({"budget": Budget(speedup=1.5)} | options))


def rounds_of(
    tmp_path: Path,
    client_fn: MakeClient = own_client,
    rounds: int = 1,
    config: Callable[[int], dict[str, Any]] = lambda node: {},
    **told: Any,
) -> list[RoundRecord]:
    """What the server wrote down of each round."""
    app, records = node_app(client_fn), list[RoundRecord]()
    grid = InProcessGrid(NODES, lambda node: app)
    for number, context in grid._contexts.items():
        context.node_config = {
            "partition-id": number - 1, "state-dir": str(tmp_path / f"node{number}"), "threads": 1,
        } | config(number)  # fmt: skip
    inner = FedAvg(min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=NODES)
    strategy = PartialUpdates(inner, on_round=records.append)
    torch.manual_seed(7)
    weights = ArrayRecord(conv_net("none").state_dict())
    strategy.start(grid, weights, num_rounds=rounds, train_config=ConfigRecord(told))
    return records


def journal(tmp_path: Path, node: int) -> list[dict[str, Any]]:
    return read_journal(tmp_path / f"node{node}" / JOURNAL)


def test_each_round_leaves_a_line_a_log_and_the_clients_state(tmp_path: Path) -> None:
    rounds_of(tmp_path, rounds=2)
    for node in (1, 2):
        lines = journal(tmp_path, node)
        assert [line["round"] for line in lines] == [1, 2]
        assert all(line["message_seconds"] > 0 and line["drift"] > 0 for line in lines)
        state = tmp_path / f"node{node}"
        assert (state / "node.log").exists()
        assert list(state.glob("client-*/profile-*.state"))


def test_a_client_with_a_folder_of_its_own_keeps_it(tmp_path: Path) -> None:
    def client_fn(context: Context) -> ElasticClient:
        return own_client(context, state_dir=tmp_path / "mine" / str(context.node_id))

    rounds_of(tmp_path, client_fn)
    assert len(list((tmp_path / "mine").glob("*/client-*/profile-*.state"))) == NODES
    assert not list((tmp_path / "node1").glob("client-*"))


def test_on_a_low_battery_it_stays_out_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fl_elastic.flower.node_app as module

    monkeypatch.setattr(module, "power_supply", lambda: PowerSupply(on_mains=False, battery=0.2))
    (record,) = rounds_of(
        tmp_path, config=lambda node: {"least-battery": 0.3 if node == 1 else 0.1}
    )
    assert journal(tmp_path, 1) == [] and len(journal(tmp_path, 2)) == 1
    assert "20 %, its least is 30 %" in record.rejected[0].reason


def test_costs_are_measured_again_after_three_rounds_of_drift(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FitReport, "drift", 1.0)
    rounds_of(tmp_path)

    def again(*drifts: float) -> list[bool]:
        for drift in drifts:
            Journal(tmp_path / "node1" / JOURNAL).append({"method": "", "drift": drift, "round": 1})
        rounds_of(tmp_path)
        return [journal(tmp_path, node)[-1]["measured_again"] for node in (1, 2)]

    assert again(2.0, 2.0) == [False, False]
    assert again(2.0, 2.0, 2.0) == [True, False]
    assert again() == [False, False]


def test_orders_without_training_tell_nothing_of_drift(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FitReport, "drift", 1.0)
    for drift in (2.0, None, 2.0, None, 2.0, None):
        # Sums for a head in closed form lie between the rounds.
        line = {"method": "", "round": 1} | ({} if drift is None else {"drift": drift})
        Journal(tmp_path / "node1" / JOURNAL).append(line)
    rounds_of(tmp_path)
    assert journal(tmp_path, 1)[-1]["measured_again"]


@pytest.mark.slow
def test_what_loading_took_is_off_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []
    fit = ElasticClient.fit

    def watched(self: ElasticClient, arrays: Any, config: Any) -> Any:
        told.append(config[DEADLINE])
        return fit(self, arrays, config)

    def slow(context: Context) -> ElasticClient:
        time.sleep(0.3)
        return own_client(context)

    monkeypatch.setattr(ElasticClient, "fit", watched)
    rounds_of(tmp_path, slow, **{DEADLINE: 60.0})
    assert told and all(30 < each <= 59.7 for each in told)


def test_a_foreseen_error_is_told_and_others_go_on(tmp_path: Path) -> None:
    def broken(context: Context) -> ElasticClient:
        if context.node_config["partition-id"] == 0:
            raise TrainingError("the camera is covered: uncover it")
        return own_client(context)

    (record,) = rounds_of(tmp_path, broken)
    assert len(record.accepted) == 1
    assert "the camera is covered" in record.rejected[0].reason


@pytest.mark.parametrize("threads", [0, 1])
def test_without_a_batch_one_sentence_says_so(tmp_path: Path, threads: int) -> None:
    def empty(context: Context) -> ElasticClient:
        client = own_client(context)
        client.train_loader = []
        return client

    (record,) = rounds_of(tmp_path, empty, config=lambda node: {"threads": threads})
    reasons = [each.reason for each in record.rejected]
    assert len(reasons) == NODES and not record.accepted
    assert all("the loader gave no batch" in reason for reason in reasons), reasons


def test_a_first_batch_without_examples_is_passed_over(tmp_path: Path) -> None:
    def sparse(context: Context) -> ElasticClient:
        client = own_client(context)
        client.train_loader = [[], *client.train_loader]
        return client

    (record,) = rounds_of(tmp_path, sparse, config=lambda node: {"threads": 0})
    assert len(record.accepted) == NODES, record.rejected


def test_a_node_that_is_set_up_wrongly_says_what_is_missing(tmp_path: Path) -> None:
    (record,) = rounds_of(
        tmp_path, config=lambda node: {"state-dir": ""} if node == 1 else {"threads": 1}
    )
    assert "lacks 'state-dir'" in record.rejected[0].reason
