"""How long a round may take: what devices say, what the server makes of it, and what clients do about it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Error, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from in_process_grid import InProcessGrid
from scripted_clients import EXAMPLES, first_arrays, manifest, scripts
from small_federation import (
    as_record,
    build,
    elastic_client,
    legacy_app,
    local_data,
    plain_sgd,
    quiet,
    run,
    scripted_app,
)
from small_models import flat_profile

from fl_elastic import Budget
from fl_elastic.errors import BudgetError, UpdateError
from fl_elastic.flower import (
    Deadline,
    ElasticClient,
    PartialUpdates,
    RoundConfig,
    RoundRecord,
    elastic_client_app,
)
from fl_elastic.flower.capabilities import Capabilities, GroupCosts
from fl_elastic.flower.records import PACKED, evaluate_reply, read_instruction
from fl_elastic.flower.tasks.task import DEADLINE, TASK
from fl_elastic.profiling import CostProfile
from fl_elastic.training import Timing, TrainerOptions
from fl_elastic.update import Manifest, decode, weights_of
from fl_elastic.update.model_wire import encode_weights

SECONDS = {1: 10.0, 2: 20.0, 3: 40.0, 4: 80.0}
"""A whole round of each node."""


def capabilities(node: int) -> Capabilities:
    return Capabilities(f"class {node % 2}", EXAMPLES[node], 10, SECONDS[node] / 10, 100.0)


def answering_app(node: int, metrics: Any = None, told: list[Any] | None = None) -> ClientApp:
    """A scripted client that also says what it can do, or ``metrics`` instead."""
    inner = scripted_app(manifest(), scripts()[node])
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Any) -> Message:
        if told is not None:
            told.append(read_instruction("train", message.content)[1].get(DEADLINE))
        return inner(message, context)

    @app.evaluate()
    def evaluate(message: Message, context: Any) -> Message:
        _, config = read_instruction("evaluate", message.content)
        if config.get(TASK) != "describe":
            return inner(message, context)
        said = capabilities(node).to_metrics() if metrics is None else metrics
        if isinstance(said, Exception):
            raise said
        return Message(evaluate_reply(0.0, 1, said), reply_to=message)

    return app


def fleet(**odd: Any) -> dict[int, ClientApp]:
    return {node: answering_app(node, odd.get(f"node_{node}")) for node in EXAMPLES}


def questions(grid: InProcessGrid) -> list[int]:
    return [
        message.metadata.dst_node_id
        for message in grid.sent
        for config in message.content.config_records.values()
        if config.get(TASK) == "describe"
    ]


def deadlines(
    terms: RoundConfig, apps: dict[int, ClientApp], rounds: int = 2
) -> list[float | None]:
    records: list[RoundRecord] = []
    run(
        PartialUpdates(quiet(), config=terms, on_round=records.append), apps, first_arrays(), rounds
    )
    assert all(len(record.accepted) == 4 for record in records)
    return [record.deadline for record in records]


def quantile(share: float) -> RoundConfig:
    # Grace beyond any wait of these tests.
    return RoundConfig(deadline=Deadline(quantile=share))


@pytest.mark.parametrize(
    ("share", "seconds"), [(0.0, 20.0), (1.0, 40.0), (0.5, 30.0), (1 / 3, 20.0)]
)
def test_the_deadline_is_a_quantile_of_what_the_fleet_needs(share: float, seconds: float) -> None:
    """But for one at either end, who may say anything."""
    assert deadlines(quantile(share), fleet()) == pytest.approx([seconds] * 2)


class MoreEpochs(FedAvg):
    """Asks for one epoch more after each second round, in settings of its own."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        own = ConfigRecord({**config, "local-epochs": (server_round + 1) // 2})
        return super().configure_train(server_round, arrays, own, grid)


def test_the_deadline_follows_the_epochs_that_a_strategy_asks_for() -> None:
    """Else it would be that of one epoch for ever, and most of the steps would be left out."""

    def app(node: int) -> ClientApp:
        inner, asked = answering_app(node), ClientApp()

        @asked.train()
        def train(message: Message, context: Any) -> Message:
            return inner(message, context)

        @asked.evaluate()
        def evaluate(message: Message, context: Any) -> Message:
            _, config = read_instruction("evaluate", message.content)
            said = replace(capabilities(node), steps=10 * config["local-epochs"])
            return Message(evaluate_reply(0.0, 1, said.to_metrics()), reply_to=message)

        return asked

    records: list[RoundRecord] = []
    strategy = PartialUpdates(quiet(MoreEpochs), config=quantile(1.0), on_round=records.append)
    _, grid = run(strategy, {node: app(node) for node in EXAMPLES}, first_arrays(), 5)
    assert [record.deadline for record in records] == pytest.approx([40.0, 40.0, 80.0, 80.0, 120.0])
    assert len(questions(grid)) == 3 * len(EXAMPLES)


def test_sending_is_part_of_what_a_device_needs() -> None:
    slow_link = Capabilities(
        "pi", 10, steps=5, full_step_seconds=2.0, model_bytes=600.0, bandwidth=20.0
    )
    assert slow_link.full_round_seconds == 40.0
    assert Capabilities.from_metrics(slow_link.to_metrics()) == slow_link


def test_every_client_is_told() -> None:
    told: list[Any] = []
    apps = {node: answering_app(node, told=told) for node in EXAMPLES}
    deadlines(RoundConfig(deadline=Deadline(seconds=7.5)), apps)
    assert told == [7.5] * 8
    told.clear()
    deadlines(RoundConfig(), apps)
    assert told == [None] * 8


def test_a_fixed_deadline_asks_nobody() -> None:
    terms = RoundConfig(deadline=Deadline(seconds=60.0))
    _, grid = run(PartialUpdates(quiet(), config=terms), fleet(), first_arrays(), 2)
    assert questions(grid) == []


def test_every_node_is_asked_once() -> None:
    strategy = PartialUpdates(quiet(), config=quantile(0.5))
    _, grid = run(strategy, fleet(), first_arrays(), 3)
    assert sorted(questions(grid)) == [1, 2, 3, 4]
    assert strategy.fleet.capabilities == {node: capabilities(node) for node in EXAMPLES}


class Growing(InProcessGrid):
    """Nodes connect over time; the inner strategy waits for them."""

    def __init__(self) -> None:
        super().__init__(4, fleet().__getitem__)
        self.connected = 0

    def get_node_ids(self) -> Iterable[int]:
        return list(super().get_node_ids())[: self.connected]


class Waiting(FedAvg):
    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Grid) -> Any:
        grid.inner.connected = {1: 2, 2: 4}[server_round]  # type: ignore[attr-defined]
        return super().configure_train(server_round, arrays, config, grid)


def test_nodes_that_connect_later_are_asked_when_they_are_there() -> None:
    records: list[RoundRecord] = []
    inner = Waiting(fraction_evaluate=0.0, min_available_nodes=2)
    strategy = PartialUpdates(inner, config=quantile(1.0), on_round=records.append)
    grid = Growing()
    strategy.start(grid, first_arrays(), num_rounds=2)
    assert [record.deadline for record in records] == [20.0, 40.0]
    assert sorted(questions(grid)) == [1, 2, 3, 4]


GOOD = capabilities(4).to_metrics()
NONSENSE: dict[str, Any] = {
    "nothing": {},
    "another answer": {"accuracy": 0.5},
    "no time": GOOD | {"full-step-seconds": 0.0},
    "negative": GOOD | {"steps": -1},
    "not a number": GOOD | {"full-step-seconds": float("nan")},
    "infinite": GOOD | {"model-bytes": float("inf")},
    "absurd": GOOD | {"full-step-seconds": 1e300},
    "text": GOOD | {"steps": "many"},
    "a truth value": GOOD | {"num-examples": True},
    "a list": GOOD | {"bandwidth": [1.0]},
    "failure": {"fl_elastic.error": "no data\nhere"},
    "exception": RuntimeError("boom"),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_a_node_that_answers_nonsense_does_not_count(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = deadlines(quantile(1.0), fleet(node_4=NONSENSE[what]))
    # Of three, the middle one.
    assert found == [20.0, 20.0]
    warnings = [r.getMessage() for r in caplog.records if "no valid capabilities" in r.getMessage()]
    # It is asked again.
    assert len(warnings) == 2
    assert all(warning.startswith("node 4 ") and "\n" not in warning for warning in warnings)


def test_if_nobody_answers_there_is_no_deadline() -> None:
    odd = {f"node_{node}": {} for node in EXAMPLES}
    assert deadlines(quantile(0.5), fleet(**odd)) == [None, None]


def test_an_error_from_the_transport_is_nonsense_too() -> None:
    def failed(reply: Message) -> Message:
        if "evaluateres.metrics" not in reply.content:
            return reply
        answered = Message(Error(code=2, reason="gone"), reply_to=reply)
        answered.metadata.__dict__["_src_node_id"] = reply.metadata.src_node_id
        return answered

    assert deadlines(quantile(0.5), fleet(), 1) == [30.0]
    strategy = PartialUpdates(quiet(), config=quantile(0.5))
    run(strategy, fleet(), first_arrays(), 1, alter=failed)
    assert strategy.fleet.capabilities == {}


@pytest.mark.parametrize(
    "options",
    [{}, {"seconds": 3.0, "quantile": 0.5}, {"seconds": 0.0}, {"seconds": -1.0},
     {"seconds": float("inf")}, {"seconds": float("nan")}, {"quantile": -0.1}, {"quantile": 1.1},
     {"quantile": float("nan")}, {"seconds": "5"}, {"seconds": True}, {"quantile": "half"}],
    ids=str,
)  # fmt: skip
def test_deadlines_that_mean_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BudgetError):
        Deadline(**options)


@pytest.fixture(scope="module")
def profile() -> CostProfile:
    return flat_profile(build(), local_data(4)[0], plain_sgd)


def client(profile: CostProfile, **options: Any) -> ElasticClient:
    steady = TrainerOptions(full_update_every=0, timing=Timing(closed_loop=False))
    defaults: dict[str, Any] = {"policy": "elastic", "options": steady, "profile": profile}
    return elastic_client(build(), 4, **(defaults | options))


def test_a_codec_that_writes_less_is_a_faster_way_to_the_server(profile: CostProfile) -> None:
    small = client(profile, budget=Budget(bandwidth=1e4), codec="int8").capabilities()
    # A byte per number instead of four, and a scale.
    assert small.bandwidth == pytest.approx(4e4, rel=1e-3)
    whole = client(profile, budget=Budget(bandwidth=1e4)).capabilities()
    assert small.full_round_seconds < whole.full_round_seconds


def test_an_uplink_budget_counts_what_the_codec_writes(profile: CostProfile) -> None:
    whole = float(profile.parameter_bytes.sum())
    made = {
        codec: client(profile, budget=Budget(uplink=0.5 * whole), codec=codec)
        for codec in ("fp32", "int8")
    }
    of = Manifest.of(build())
    data = [np.frombuffer(encode_weights(weights_of(build(), of), of), dtype=np.uint8)]
    reports = {}
    for codec, each in made.items():
        each.fit(data, {PACKED: True})
        assert each.report is not None
        reports[codec] = each.report.plan
    assert not reports["fp32"].mask.all()
    # A byte per number: everything is a quarter of what the plan counts.
    assert reports["int8"].mask.all()


def test_both_kinds_of_app_say_what_the_device_can_do(profile: CostProfile) -> None:
    def made() -> ElasticClient:
        return client(profile, budget=Budget(bandwidth=1e4), device="pi 4", epochs=2)

    sent = float(profile.parameter_bytes.sum())
    costs = GroupCosts.of(profile)
    expected = Capabilities("pi 4", 24, 8, profile.full_step_seconds, sent, 1e4, groups=costs)
    assert made().capabilities() == expected
    apps = {1: legacy_app(made), 2: elastic_client_app(lambda _: made())}
    strategy = PartialUpdates(quiet(nodes=2), config=quantile(0.5))
    arrays = weights_of(build(), Manifest.of(build()))
    run(strategy, apps, as_record(arrays))
    assert strategy.fleet.capabilities == {1: expected, 2: expected}
    ledger = strategy.fleet.ledger
    assert ledger is not None
    assert set(ledger.shares()) == {"pi 4"}


def trained(made: ElasticClient, deadline: float | None) -> tuple[float, float]:
    """Seconds of training and of sending, by the costs that the client plans with."""
    known = Manifest.of(build())
    data = encode_weights(weights_of(build(), known), known, version=1)
    config = {PACKED: True} | ({} if deadline is None else {DEADLINE: deadline})
    arrays, examples, metrics = made.fit([np.frombuffer(data, np.uint8)], config)
    assert examples == 24, metrics
    update = decode(arrays[0].tobytes(), known)
    sent = sum(4 * d.size for n, d in update.deltas.items() if "running" not in n)
    assert made.report is not None
    begins = [at for at, _ in made.report.plans]
    steps = np.diff([*begins, metrics["steps"]])
    plans = [plan.predicted_step_seconds for _, plan in made.report.plans]
    return float(steps @ plans), sent / (made.budget.bandwidth or float("inf"))


@pytest.mark.parametrize("share", [0.9, 0.6, 0.25])
@pytest.mark.parametrize("policy", ["elastic", "full", "last_k"])
@pytest.mark.parametrize("bandwidth", [None, 60.0])
def test_a_client_keeps_the_deadline_with_what_it_sends(
    profile: CostProfile, policy: str, share: float, bandwidth: float | None
) -> None:
    whole = 4 * profile.full_step_seconds
    whole += float(profile.parameter_bytes.sum()) / (bandwidth or float("inf"))
    made = client(profile, policy=policy, budget=Budget(bandwidth=bandwidth))
    everything = float(profile.parameter_bytes.sum()) / (bandwidth or float("inf"))
    if policy == "full" and everything > share * whole:
        with pytest.raises(AssertionError, match="use a policy that selects"):
            trained(made, share * whole)
        return
    if policy == "full" and everything + profile.full_step_seconds > share * whole:
        with pytest.raises(AssertionError, match="does not pay for one step"):
            trained(made, share * whole)
        return
    training, sending = trained(made, share * whole)
    assert training + sending <= share * whole * (1 + 1e-6)
    assert training > 0.1 * share * whole


def test_a_device_whose_own_deadline_is_earlier_keeps_to_that(profile: CostProfile) -> None:
    whole = 4 * profile.full_step_seconds
    own, _ = trained(client(profile, budget=Budget(deadline=0.3 * whole)), None)
    for told in (0.3 * whole, 0.9 * whole, None):
        found, _ = trained(client(profile, budget=Budget(deadline=0.3 * whole)), told)
        assert found == own <= 0.3 * whole * (1 + 1e-6)
    found, _ = trained(client(profile, budget=Budget(deadline=0.9 * whole)), 0.3 * whole)
    assert found <= 0.3 * whole * (1 + 1e-6)


def test_a_speed_up_holds_beside_the_deadline(profile: CostProfile) -> None:
    whole = 4 * profile.full_step_seconds
    found, _ = trained(client(profile, budget=Budget(speedup=2.0)), 100 * whole)
    assert found <= whole / 2 * (1 + 1e-6)


def test_what_cannot_be_read_as_capabilities_names_the_entry() -> None:
    with pytest.raises(UpdateError, match="capability 'steps' is 'many', expected a number from 1"):
        Capabilities.from_metrics(GOOD | {"steps": "many"})


def test_long_names_of_devices_are_cut() -> None:
    assert len(Capabilities.from_metrics(GOOD | {"device": "x" * 9999}).device) == 80


def test_the_question_is_no_evaluation(profile: CostProfile) -> None:
    """It brings no model, and the client's own stays as it is."""
    made = client(profile, budget=Budget())
    before = [array.copy() for array in made.get_parameters({})]
    loss, examples, metrics = made.evaluate([], {TASK: "describe"})
    assert (loss, examples) == (0.0, 24)
    assert ConfigRecord(metrics)
    after = made.get_parameters({})
    assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))
