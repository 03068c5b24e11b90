"""The fleet's cut: nobody trains below it, clients keep the features there, and only what is above travels."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_federation import arrays_of, as_weights, local_data, plain_sgd, quiet, run
from small_models import images, loss_fn
from spies import passing_below
from torch import nn

from fl_elastic import Budget
from fl_elastic.flower import (
    ElasticClient,
    PartialUpdates,
    RoundConfig,
    client_round,
    elastic_client_app,
)
from fl_elastic.flower.fleet_cut import FrozenConsensus
from fl_elastic.flower.pretrained import fresh_statistics
from fl_elastic.flower.records import MAY_TRAIN, PACKED, train_reply
from fl_elastic.flower.tasks.train import Train
from fl_elastic.training import FitReport
from fl_elastic.update import Manifest, weights_of
from fl_elastic.update.model_wire import encode_weights

CUT = "6"


@pytest.fixture(autouse=True)
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many passes a client makes in a round, whatever its costs are here."""
    found = [1]
    monkeypatch.setattr(client_round, "passes_above_cut", lambda *_: found[0])
    return found


def build() -> nn.Module:
    torch.manual_seed(3)
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 8), (8, 8)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


def federation(
    folder: Path,
    rounds: int,
    terms: RoundConfig,
    policy: str = "full",
    alter: Any = lambda reply: reply,
    **options: Any,
) -> tuple[dict[str, Any], list[Any], list[FitReport]]:
    """Four clients whose processes live for one message; return the model, the records and the fits."""
    records: list[Any] = []
    reports: list[FitReport] = []

    class Noted(ElasticClient):
        def fit(self, *given: Any) -> Any:
            found = super().fit(*given)
            if self.report is not None:
                reports.append(self.report)
            return found

    def client_of(node: int) -> ElasticClient:
        return Noted(
            build(), local_data(node), images(2, seed=99), budget=Budget(), policy=policy,
            loss_fn=loss_fn, optimizer_fn=plain_sgd, state_dir=folder / str(node), **options,
        )  # fmt: skip

    apps = {node: elastic_client_app(lambda _, node=node: client_of(node)) for node in range(1, 5)}
    strategy = PartialUpdates(quiet(), config=terms, on_round=records.append)
    result, _ = run(strategy, apps, arrays_of(build()), rounds, alter)
    return as_weights(result.arrays), records, reports


def below(name: str) -> bool:
    return int(name.partition(".")[0]) < int(CUT)


@pytest.mark.parametrize("policy", ["full", "elastic", "last_k", "random"])
def test_what_lies_below_stays_as_it_is_under_every_policy(tmp_path: Path, policy: str) -> None:
    found, records, _ = federation(tmp_path, 2, RoundConfig(cut=f"fixed:{CUT}"), policy)
    for name, before in as_weights(arrays_of(build())).items():
        if below(name) or "running" in name:
            np.testing.assert_array_equal(found[name], before)
    trained = {name for each in records for one in each.accepted for name in one.steps}
    assert trained and not any(below(name) for name in trained)


@pytest.mark.slow
def test_a_round_has_as_many_passes_as_take_as_long_as_one_over_everything(
    tmp_path: Path, passes: list[int]
) -> None:
    steps = {}
    for passes[0] in (1, 3):
        _, _, reports = federation(
            tmp_path / str(passes[0]), 2, RoundConfig(cut=f"fixed:{CUT}", read="last")
        )
        steps[passes[0]] = sum(each.steps for each in reports)
    assert steps[3] == 3 * steps[1]
    uncut = tmp_path / "uncut"
    _, _, reports = federation(uncut, 2, RoundConfig())
    assert sum(each.steps for each in reports) == steps[1]


def test_the_pass_of_round_zero_leaves_the_features_for_the_rounds(tmp_path: Path) -> None:
    terms = RoundConfig(cut=f"fixed:{CUT}", read="last")
    _, records, reports = federation(tmp_path, 1, terms)
    assert [each.trains for each in records] == [False, True, False] and len(
        records[0].accepted
    ) == 4
    assert [each.forward.computed for each in reports if each.forward is not None] == [0] * 4


def test_only_what_is_above_is_sent_once_the_model_is_there(tmp_path: Path) -> None:
    _, records, _ = federation(tmp_path, 3, RoundConfig(cut=f"fixed:{CUT}"))
    first, *later = [[one.downlink_bytes for one in each.accepted] for each in records]
    assert set(first) == {records[0].downlink_bytes}
    assert all(sent < 0.7 * first[0] for each in later for sent in each)
    assert all(one.uplink_bytes < 0.7 * first[0] for each in records for one in each.accepted)


@pytest.mark.parametrize("says", ["everything", "nothing", "rubbish"])
def test_who_trains_below_the_cut_changes_nothing_there(tmp_path: Path, says: str) -> None:
    """It trains the whole model, and says whatever it likes of what may be trained."""
    manifest = Manifest.of(build())
    said = {"everything": json.dumps([*range(len(manifest))]), "rubbish": "[[" * 9999}

    def alter(message: Any) -> Any:
        if message.metadata.src_node_id == 2:
            client = ElasticClient(
                build(), local_data(2), images(1), budget=Budget(), loss_fn=loss_fn,
                optimizer_fn=plain_sgd, policy="full",
            )  # fmt: skip
            packed = encode_weights(weights_of(build(), manifest), manifest, version=1)
            arrays = [np.frombuffer(packed, dtype=np.uint8)]
            reply, examples, metrics = client.fit(arrays, {PACKED: True})
            told = {MAY_TRAIN: said[says]} if says in said else {}
            message.content = train_reply(reply, examples, metrics | told)
        return message

    found, records, _ = federation(tmp_path, 1, RoundConfig(cut=f"fixed:{CUT}"), alter=alter)
    (liar,) = [one for one in records[0].accepted if one.node_id == 2]
    assert "0.weight" in liar.steps
    for name, before in as_weights(arrays_of(build())).items():
        assert np.array_equal(found[name], before) == (
            below(name) or not name.endswith(("weight", "bias"))
        )


@pytest.mark.parametrize(
    "terms",
    [RoundConfig(cut=f"fixed:{CUT}"), RoundConfig(read="last"), RoundConfig()],
    ids=["cut", "round zero", "neither"],
)
@pytest.mark.parametrize("pretrained", [True, False])
def test_statistics_that_have_never_seen_data_are_not_kept_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, terms: RoundConfig, pretrained: bool
) -> None:
    caplog.set_level(logging.WARNING, "fl_elastic")
    model = build()
    if pretrained:
        model(images(1)[0][0])
    assert len(fresh_statistics(as_weights(arrays_of(model)), Manifest.of(model))) == (
        0 if pretrained else 3
    )
    apps = {
        node: elastic_client_app(lambda _, node=node: plain_client(tmp_path / str(node)))
        for node in range(1, 5)
    }
    run(PartialUpdates(quiet(), config=terms), apps, arrays_of(model), 1, lambda reply: reply)
    said = "the statistics of 3 norms have never seen data (1.running_mean)" in caplog.text
    assert said == (terms.keeps_statistics and not pretrained)


def plain_client(folder: Path) -> ElasticClient:
    return ElasticClient(
        build(), local_data(1), images(1), budget=Budget(), loss_fn=loss_fn, policy="full",
        optimizer_fn=plain_sgd, state_dir=folder,
    )  # fmt: skip


def test_a_cut_that_the_model_does_not_have_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "fl_elastic")
    federation(tmp_path, 1, RoundConfig(cut="fixed:nowhere"))
    assert "no group 'nowhere' to cut below" in caplog.text


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (["[2]", "[2]", "[0, 1, 2]"], [0, 1]),
        (["[2]", "[0]", "[0, 1, 2]"], []),
        (["[2]", "nothing", None], []),
        (["[2]", "[2]", "[1.5]", "[-1]", "[99]"], []),
        (["[]", "[]", "[]"], [0, 1, 2]),
        ([], []),
    ],
)
def test_what_more_than_half_say_counts(said: list[Any], kept: list[int]) -> None:
    model = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(3)])
    manifest = Manifest.of(model)
    heard = FrozenConsensus(manifest)
    for each in said:
        heard.hear(each)
    before = {name: np.zeros(1) for name in manifest.names}
    after = heard.put_back({name: np.ones(1) for name in manifest.names}, before)
    assert [manifest.index[name] for name, each in after.items() if not each.any()] == kept


def test_test_data_pass_below_the_cut_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluation finds what an earlier process kept, and says what it said without."""
    passed = passing_below(monkeypatch)

    def client_of(kept: int) -> ElasticClient:
        return ElasticClient(
            build(), local_data(1), images(2, seed=99), budget=Budget(), policy="full",
            loss_fn=loss_fn, optimizer_fn=plain_sgd, state_dir=tmp_path / str(kept),
            feature_bytes=kept,
        )  # fmt: skip

    told = Train(cut=CUT).to_config()
    whole = [len(targets) for _, targets in images(2, seed=99)]
    found = {}
    for kept in (0, 1 << 20):
        start = client_of(kept).get_parameters({})
        weights, _, _ = client_of(kept).fit(start, told)
        assert len(weights) == len(start)
        for again in (False, True):
            client = client_of(kept)
            passed.clear()
            found[kept, again] = client.evaluate(start, told)
            # Before the pass it is tried on two examples, and on one; what is found, on two.
            tried = [2, 2, 1]
            assert passed == ([] if not kept else [*tried, 2] if again else tried + whole)
    plain = found[0, False]
    for loss, examples, metrics in found.values():
        assert examples == plain[1] and metrics["accuracy"] == plain[2]["accuracy"]
        assert loss == pytest.approx(plain[0], rel=1e-3)
    # Train and test features are apart, so that neither wipes the other's.
    assert len([*(tmp_path / str(1 << 20)).glob("*features*.db")]) == 2
