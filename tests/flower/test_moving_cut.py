"""The server moves the fleet's cut to where clients say that training gains most."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from small_federation import arrays_of, as_weights, local_data, plain_sgd, quiet, run
from small_models import images, loss_fn
from test_fleet_cut import build
from torch import nn

from fl_elastic import Budget
from fl_elastic.flower import (
    Checkpointed,
    ElasticClient,
    PartialUpdates,
    RoundConfig,
    elastic_client_app,
)
from fl_elastic.flower.fleet_cut import FleetCut
from fl_elastic.flower.records import IMPORTANCE, train_reply
from fl_elastic.flower.round_config import Deadline
from fl_elastic.flower.tasks.cut_worth import RateCuts
from fl_elastic.flower.tasks.task import TASK
from fl_elastic.update.manifest import places_of

MOVING = RoundConfig(cut="moving", solve_every=2)
# From the head down; "6" is a convolution with a norm above it.
UPPER, LOWER, ALL = "6", "3", "0"


def says(**worth: float) -> dict[str, float]:
    return {name.removeprefix("at"): value for name, value in worth.items()}


def federation(
    folder: Path,
    rounds: int,
    worth: Mapping[str, float] | None = None,
    terms: RoundConfig = MOVING,
    alter: Any = lambda reply: reply,
    strategy_of: Any = lambda each: each,
    memory: float | None = None,
) -> tuple[dict[str, Any], list[Any], list[int]]:
    """Four clients; return the model, the records, and who was asked what cuts are worth."""
    records: list[Any] = []
    asked: list[int] = []

    class Scripted(ElasticClient):
        def fit(self, parameters: Any, config: dict[str, Any]) -> Any:
            packed, examples, metrics = super().fit(parameters, config)
            if config.get(TASK) == RateCuts.name and worth is not None:
                assert set(worth) <= set(json.loads(metrics[IMPORTANCE]))
                metrics[IMPORTANCE] = json.dumps(dict(worth))
            return packed, examples, metrics

    def client_of(node: int) -> ElasticClient:
        return Scripted(
            build(), local_data(node), images(2, seed=99), budget=Budget(memory=memory),
            policy="elastic", loss_fn=loss_fn, optimizer_fn=plain_sgd,
            state_dir=folder / str(node),
        )  # fmt: skip

    def note(record: Any) -> None:
        records.append(record)
        if not record.trains:
            # Who sends sums has something to send.
            asked.extend(each.node_id for each in record.accepted if not each.uplink_bytes)

    apps = {node: elastic_client_app(lambda _, node=node: client_of(node)) for node in range(1, 5)}
    strategy = strategy_of(PartialUpdates(quiet(), config=terms, on_round=note))
    result, _ = run(strategy, apps, arrays_of(build()), rounds, alter)
    return as_weights(result.arrays), records, asked


def moved(found: Mapping[str, Any]) -> set[int]:
    """Return the layers whose weights are others than before."""
    before = as_weights(arrays_of(build()))
    return {
        int(name.partition(".")[0])
        for name, value in found.items()
        if name.endswith(("weight", "bias")) and not np.array_equal(value, before[name])
    }


@pytest.mark.parametrize(("place", "layers"), [(UPPER, {6, 7, 11}), (ALL, {0, 1, 3, 4, 6, 7, 11})])
def test_what_most_is_gained_above_is_trained_and_nothing_else(
    tmp_path: Path, place: str, layers: set[int]
) -> None:
    found, records, _ = federation(tmp_path, 2, {place: 2.0, LOWER: 1.0})
    assert moved(found) == layers
    assert {each.cut for each in records if each.trains} == {place}


@pytest.mark.slow
def test_three_of_the_fleet_are_asked_until_there_is_a_cut(tmp_path: Path) -> None:
    for worth, rounds in (({UPPER: 1.0}, [1]), ({}, [1, 3, 5])):
        _, records, asked = federation(tmp_path / str(len(worth)), 5, worth)
        assert [each.server_round for each in records if not each.trains] == rounds
        assert len(asked) == 3 * len(rounds) and len({*asked}) == 3


def test_what_they_really_say_moves_it_somewhere(tmp_path: Path) -> None:
    terms = RoundConfig(cut="moving", read="last", deadline=Deadline(seconds=600))
    found, records, asked = federation(tmp_path, 3, terms=terms)
    # They go by the head of all, and the first round keeps the features at the cut.
    assert [each.server_round for each in records[:3]] == [0, 1, 1] and len(asked) == 3
    (cut,) = {each.cut for each in records[1:]}
    assert cut and not records[0].cut
    computed = [
        [each.metrics["features-computed"] for each in record.accepted]
        for record in records
        if record.trains
    ]
    assert all(computed[0]) and not any(computed[1]) and not any(computed[2])
    # The head is solved for, and nobody trains it.
    trained = {name for each in records for one in each.accepted for name in one.steps}
    assert trained and "11.weight" not in trained and 11 in moved(found)


def test_the_preset_for_pretrained_models_turns_it_all_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flwr")
    preset = PartialUpdates.for_unequal_devices(quiet(), deadline=600, pretrained=True)
    assert "cut='moving'" in caplog.text and "read='auto'" in caplog.text
    found, records, asked = federation(
        tmp_path, 1, strategy_of=lambda _: preset, terms=preset.config
    )
    assert not records and not asked  # which are the other strategy's
    # Labels by chance: any place is as good as another one.
    assert places_of(found) == preset.fleet.read
    assert preset.fleet.kept_head == ("head" if preset.fleet.read else "11")
    assert preset.solved.weights


def fresh_and_trained(name: str) -> tuple[nn.Module, nn.Module]:
    """A model as it is made, and as it is once it was trained."""
    torch.manual_seed(0)
    made = {
        "batch norm": nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.PReLU(8), nn.Linear(8, 3)),
        "layer norm": nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3)),
        "group norm": nn.Sequential(nn.Linear(4, 8), nn.GroupNorm(2, 8), nn.ReLU(), nn.Linear(8, 3)),
    }[name]  # fmt: skip
    trained = deepcopy(made)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(trained(torch.randn(16, 4)), torch.arange(16) % 3).backward()
        optimizer.step()
    return made, trained


@pytest.mark.parametrize("name", ["batch norm", "layer norm", "group norm"])
def test_the_preset_sees_whether_a_model_was_trained_before(name: str) -> None:
    cuts = [
        PartialUpdates.for_unequal_devices(
            quiet(), deadline=9, initial_arrays=ArrayRecord(model.state_dict()), pretrained=told
        ).config.cut
        for model in fresh_and_trained(name)
        for told in (None, False, True)
    ]
    assert cuts == ["none", "none", "moving", "moving", "none", "moving"]


@pytest.mark.slow
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("restarted", [False, True])
def test_start_decides_where_nobody_said_whether_the_model_was_trained(
    tmp_path: Path, trained: bool, restarted: bool
) -> None:
    """Also under a server that writes checkpoints, and when that is started again."""
    model = build()
    if trained:
        with torch.no_grad():
            model(images(1)[0][0])
    arrays = ArrayRecord(model.state_dict())
    for _ in range(1 + restarted):
        preset = PartialUpdates.for_unequal_devices(quiet(), deadline=600)
        assert not preset.config.solves_head
        strategy = Checkpointed(preset, tmp_path / "kept") if restarted else preset
        apps = {
            node: elastic_client_app(
                lambda _, node=node: ElasticClient(
                    build(), local_data(node), images(2, seed=99), budget=Budget(),
                    loss_fn=loss_fn, optimizer_fn=plain_sgd,
                )
            )
            for node in range(1, 5)
        }  # fmt: skip
        run(strategy, apps, arrays, 1)
        assert (preset.config.read, preset.config.cut) == (
            ("auto", "moving") if trained else ("none", "none")
        )
        assert bool(preset.solved.weights) == trained


def test_one_liar_moves_nothing(tmp_path: Path) -> None:
    lied: list[int] = []

    def alter(message: Any) -> Any:
        if not lied and IMPORTANCE in message.content.config_records.get("fitres.metrics", {}):
            lied.append(message.metadata.src_node_id)
            message.content = train_reply(
                [np.zeros(0, np.uint8)], 0, {IMPORTANCE: json.dumps({ALL: 1e300})}
            )
        return message

    _, records, _ = federation(tmp_path, 1, {UPPER: 2.0, ALL: 1.0}, alter=alter)
    assert records[-1].cut == UPPER and lied


@pytest.mark.parametrize("text", ["", "[1]", '{"nowhere": 1.0}', '{"6": -1.0}', '{"6": NaN}'])
def test_where_nobody_says_anything_sensible_all_is_trained(tmp_path: Path, text: str) -> None:
    def alter(message: Any) -> Any:
        if IMPORTANCE in message.content.config_records.get("fitres.metrics", {}):
            message.content = train_reply([np.zeros(0, np.uint8)], 0, {IMPORTANCE: text})
        return message

    found, records, _ = federation(tmp_path, 1, {UPPER: 1.0}, alter=alter)
    assert records[-1].cut == "" and 0 in moved(found)


def test_a_device_that_cannot_hold_a_full_step_says_so_and_trains_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "fl_elastic")
    _, records, asked = federation(tmp_path, 1, memory=60_000)
    assert "the memory budget is 60000" in caplog.text and not asked
    assert len(records[0].rejected) == 3 and len(records[-1].accepted) == 4


def test_the_median_decides() -> None:
    cut = FleetCut(MOVING)
    cut.decide(
        [says(at6=1.0), says(at6=0.4, at3=0.6), says(at6=0.1, at3=1.0), says(at6=0.0, at3=1e9)]
    )
    assert cut.group == "3"
    # One of two who answered is not enough, and nobody is none.
    for said in ([says(at3=0.5, at6=0.5), says(at0=1.0)], []):
        cut = FleetCut(MOVING)
        assert not cut.decide(said) and cut.group == ""


@pytest.mark.parametrize("liars", [1, 2])
def test_few_that_lie_about_many_places_move_it_nowhere_that_others_do_not_say(liars: int) -> None:
    """Worth by place: a lie at each place would shift each place's median a little."""
    honest = [
        says(at6=0.3, at3=0.4, at0=0.3),
        says(at6=0.25, at3=0.4, at0=0.35),
        says(at6=0.1, at3=0.5, at0=0.4),
    ]
    for lie in (says(at6=1e9, at3=0.0, at0=0.0), says(at6=0.0, at3=0.0, at0=1e9)):
        cut = FleetCut(MOVING)
        cut.decide([*honest, *[lie] * liars])
        assert cut.group == "3"


@pytest.mark.parametrize("terms", [RoundConfig(), RoundConfig(cut="fixed:6")])
def test_a_cut_that_is_given_is_not_asked_about(terms: RoundConfig) -> None:
    cut = FleetCut(terms)
    assert not any(cut.due(number) for number in range(1, 50))
    cut.restore("3")
    assert cut.group == terms.cut_group


def test_its_state_is_put_back() -> None:
    cut = FleetCut(MOVING)
    assert cut.due(1) and not cut.due(2)
    cut.restore("6")
    assert cut.group == "6" and not any(cut.due(number) for number in range(1, 30))
