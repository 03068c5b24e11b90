"""What a server asks besides training: coverage, one seed for all, shared importance, the last round's change."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from scripted_clients import EXAMPLES, first_arrays, manifest, scripts
from small_federation import (
    build,
    elastic_client,
    local_data,
    plain_sgd,
    quiet,
    run,
    scripted_app,
)
from small_models import flat_profile
from trainer_settings import free_probes, options_of

from fl_elastic import Budget
from fl_elastic.closed_form.sums_privacy import SumsPrivacy
from fl_elastic.errors import SettingError, UpdateError
from fl_elastic.flower import Deadline, ElasticClient, PartialUpdates, RoundConfig, RoundRecord
from fl_elastic.flower.capabilities import read_importance
from fl_elastic.flower.records import IMPORTANCE, PACKED, read_instruction
from fl_elastic.flower.tasks.cut_worth import RateCuts
from fl_elastic.flower.tasks.describe import Describe
from fl_elastic.flower.tasks.evaluate import Evaluate
from fl_elastic.flower.tasks.forgetting import MeasureLoss, SumSquaredGradients
from fl_elastic.flower.tasks.rank_places import RankPlaces
from fl_elastic.flower.tasks.solve_head import SolveHead
from fl_elastic.flower.tasks.task import DEADLINE, TASK, RoundTask, config_key, task_in
from fl_elastic.flower.tasks.train import Train
from fl_elastic.profiling import CostProfile
from fl_elastic.update import Manifest, decode, weights_of
from fl_elastic.update.model_wire import encode_weights

PRIVACY = SumsPrivacy(epsilon=4.0, delta=1e-5, clip=20.0)
GROUPS, KEEP = map(config_key, ("groups", "keep"))


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"plan": "server side"}, "plan 'server side'"),
        ({"plan": "none"}, "set read='auto' as well"),
        ({"solve_every": -1}, "solve_every -1"),
        ({"read": "nowhere"}, "read: place 'nowhere'"),
        ({"read": "a@grid4+a@grid4"}, "read"),
        ({"read": "@grid2"}, "read"),
        ({"read": "x@"}, "read"),
        ({"sums_privacy": PRIVACY, "read": "last"}, "spend its epsilon again"),
        ({"sums_privacy": PRIVACY, "solve_every": 0}, "spend its epsilon again"),
        ({"cut": "deep"}, "cut 'deep'"),
        ({"cut": "fixed:"}, "none, fixed:GROUP"),
        ({"forget": -1.0}, "forget -1"),
        ({"forget": float("inf")}, "forget inf"),
        ({"forget": float("nan")}, "forget nan"),
        ({"forget": "yes"}, "forget 'yes'"),
        ({"solve_every": 1.5}, "solve_every 1.5"),
        ({"deadline": 5.0}, r"deadline 5.0 is no Deadline: give Deadline\(seconds"),
    ],
)
def test_a_bad_config_is_refused(config: dict[str, Any], word: str) -> None:
    with pytest.raises(SettingError, match=word):
        RoundConfig(**config)


@pytest.mark.parametrize(
    "task",
    [
        Train(),
        Train(deadline=2.5, groups='["head"]', rate=0.25, keep=True),
        SolveHead(clip=1.0, noise=0.5, cut="conv"),
        RankPlaces(deadline=3.0, places="input@flat", examples=7),
        RateCuts(kept_head="head"),
        SumSquaredGradients(),
        MeasureLoss(read="1@grid4"),
    ],
)
def test_tasks_survive_the_journey(task: RoundTask) -> None:
    assert task_in(dict(ConfigRecord(task.to_config()))) == task
    assert Train().to_config() == Evaluate().to_config() == {}


def test_a_task_comes_in_its_own_kind_of_message_and_is_known() -> None:
    assert task_in(Describe().to_config(), "evaluate") == Describe()
    with pytest.raises(
        UpdateError, match="task 'describe' does not come in a message of type 'train'"
    ):
        task_in(Describe().to_config())
    with pytest.raises(UpdateError, match="task 'sing', which this version does not know"):
        task_in({TASK: "sing"})


def watched(seen: dict[int, list[dict[str, Any]]], reported: dict[int, Any] | None = None) -> Any:
    """Scripted clients that note their config, and may report importance."""

    def app(node: int) -> ClientApp:
        found = ClientApp()
        usual = scripted_app(manifest(), scripts()[node])

        @found.train()
        def train(message: Message, context: Any) -> Message:
            _, config = read_instruction("train", message.content)
            seen.setdefault(node, []).append(config)
            reply = usual(message, context)
            if reported is not None and node in reported:
                reply.content["fitres.metrics"][IMPORTANCE] = reported[node]
            return reply

        return found

    return {node: app(node) for node in EXAMPLES}


MANIFEST = Manifest.of(build("none"))


@pytest.fixture(scope="module")
def profile() -> CostProfile:
    return flat_profile(build("none"), local_data(4)[0], plain_sgd)


def client(
    profile: CostProfile,
    node: int = 4,
    policy: str = "elastic",
    speedup: float = 2.0,
    **options: Any,
) -> ElasticClient:
    settings = options_of(**{"closed_loop": False, "full_update_every": 0} | options)
    return elastic_client(
        build("none"),
        node,
        policy,
        budget=Budget(speedup=speedup),
        profile=profile,
        options=settings,
    )


def chosen(made: ElasticClient, **config: Any) -> set[str]:
    data = encode_weights(weights_of(build("none"), MANIFEST), MANIFEST, version=1)
    arrays, examples, metrics = made.fit([np.frombuffer(data, np.uint8)], {PACKED: True, **config})
    assert examples, metrics
    return set(decode(arrays[0].tobytes(), MANIFEST).deltas)


def test_importance_is_a_moving_mean_over_the_fleet() -> None:
    seen: dict[int, list[dict[str, Any]]] = {}
    reported = {
        1: json.dumps({"head": 3.0, "stem": 1.0}), 2: json.dumps({"head": 10.0}),
        3: json.dumps({"stem": 0.5}), 4: "no JSON",
    }  # fmt: skip
    found: list[dict[str, float]] = []

    def report_anew(record: RoundRecord) -> None:
        found.append(strategy.fleet.importance)
        if record.server_round == 3:
            reported[1] = json.dumps({"head": 1.0})
            reported[3] = json.dumps({"stem": 1.0})

    strategy = PartialUpdates(quiet(), config=RoundConfig(plan="server"), on_round=report_anew)
    result, _ = run(strategy, watched(seen, reported), first_arrays(), 4)
    # Shares of each: (0.75, 0.25), (1, 0), (0, 1); the fourth does not count.
    expected = {"head": 1.75 / 3, "stem": 1.25 / 3}
    assert found[:3] == [pytest.approx(expected)] * 3
    moved = {"head": 0.7 * 1.75 / 3 + 0.3 * 2 / 3, "stem": 0.7 * 1.25 / 3 + 0.3 / 3}
    assert strategy.fleet.importance == pytest.approx(moved)
    # It is no metric.
    assert all(IMPORTANCE not in record for record in result.train_metrics_clientapp.values())


GARBAGE: list[Any] = [
    "", "null", "[]", "3", '"text"', "{}", '{"head": "much"}', '{"head": NaN}', '{"head": Infinity}',
    '{"head": -1.0, "stem": 2.0}', '{"head": 0.0}', '{"head": null}', '{"head": [1]}', "[" * 100_000,
    '{"head": 1e308, "stem": 1e308}', '{"head": ' + "9" * 400 + "}", 7, 1.5, True, b"\xff", [1.0],
    json.dumps({str(i): 1.0 for i in range(100_001)}),
]  # fmt: skip


def test_garbage_for_importance_is_ignored() -> None:
    assert [each for each in GARBAGE if read_importance(each) != {}] == []
    records: list[RoundRecord] = []
    strategy = PartialUpdates(quiet(), config=RoundConfig(plan="server"), on_round=records.append)
    run(strategy, watched({}, {2: GARBAGE[13], 3: 7}), first_arrays(), 2)
    assert strategy.fleet.importance == {}
    assert all(len(record.accepted) == 4 for record in records)


def test_a_client_reports_its_importance_only_when_asked(profile: CostProfile) -> None:
    data = [np.frombuffer(encode_weights(weights_of(build("none"), MANIFEST), MANIFEST), np.uint8)]
    asked = client(profile).fit(data, {PACKED: True, GROUPS: json.dumps(profile.group_names)})[2]
    assert set(json.loads(asked[IMPORTANCE])) == set(profile.group_names)
    assert read_importance(asked[IMPORTANCE])
    assert IMPORTANCE not in client(profile).fit(data, {PACKED: True})[2]


def test_groups_that_would_increase_the_loss_do_not_spoil_the_report(
    profile: CostProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_probes(monkeypatch)
    data = [np.frombuffer(encode_weights(weights_of(build("none"), MANIFEST), MANIFEST), np.uint8)]
    negative = 0
    for node in range(1, 5):
        made = client(profile, node, speedup=1.5)
        sent = made.fit(data, {PACKED: True, GROUPS: json.dumps(profile.group_names)})[2][
            IMPORTANCE
        ]
        assert made.report is not None
        own = made.report.importance
        negative += min(own.values()) < 0
        positive = {name: score for name, score in own.items() if score > 0}
        expected = {name: score / sum(positive.values()) for name, score in positive.items()}
        found = read_importance(sent)
        assert {name: share for name, share in found.items() if share} == pytest.approx(expected)
    assert negative


def test_who_is_told_the_same_shares_one_message() -> None:
    terms = RoundConfig(deadline=Deadline(seconds=60.0), delta_downlink=True)
    seen: dict[int, list[dict[str, Any]]] = {}
    _, grid = run(PartialUpdates(quiet(), config=terms), watched(seen), first_arrays(), 1)
    assert len({id(message.content) for message in grid.sent}) == 1
    config = seen[1][0]
    assert (config[DEADLINE], config[KEEP]) == (60.0, True)
    assert GROUPS not in config


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("config", 5),
        ("config", RoundConfig),
        ("merge", "late"),
        ("server_optimizer", "adam"),
        ("average", 3),
        ("limits", 10),
        ("on_round", []),
    ],
)
def test_a_setting_of_another_kind_is_refused_at_once(name: str, given: Any) -> None:
    with pytest.raises(SettingError, match=f"{name} .* is no "):
        PartialUpdates(FedAvg(), **{name: given})
