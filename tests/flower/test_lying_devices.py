"""What a device says of itself is a claim: one that lies sets no deadline, no plan, and fills no memory."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from flwr.app import Error, Message
from scripted_clients import EXAMPLES, first_arrays, first_weights, manifest
from small_federation import quiet, run
from test_deadlines import SECONDS, answering_app, capabilities, deadlines, quantile, questions
from test_round_config import watched

from fl_elastic.flower import Deadline, PartialUpdates, RoundConfig, RoundRecord
from fl_elastic.flower.capabilities import Capabilities, GroupCosts, GroupNames, read_importance
from fl_elastic.flower.client_availability import ClientAvailability, inner_times
from fl_elastic.flower.client_registry import ClientRegistry
from fl_elastic.flower.metrics import believed_metrics, left_out_of
from fl_elastic.flower.round_config import reply_timeout
from fl_elastic.flower.server_plan import ServerPlanner
from fl_elastic.state.archive import Kind, archive_bytes
from fl_elastic.state.codec import to_archive
from fl_elastic.update import Manifest
from fl_elastic.update.manifest import Role


def said(node: int, **changes: Any) -> Any:
    return capabilities(node).to_metrics() | {k.replace("_", "-"): v for k, v in changes.items()}


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("seconds", [1e-9, 1e6])
@pytest.mark.parametrize("liar", EXAMPLES)
def test_one_that_lies_about_its_speed_sets_no_deadline(
    share: float, seconds: float, liar: int
) -> None:
    odd = {liar: said(liar, full_step_seconds=seconds, steps=1000)}
    apps = {node: answering_app(node, odd.get(node)) for node in EXAMPLES}
    honest = [SECONDS[node] for node in EXAMPLES if node != liar]
    for found in deadlines(quantile(share), apps):
        assert found is not None and min(honest) <= found <= max(honest)


def test_the_models_size_is_the_servers_to_know() -> None:
    odd = said(1, model_bytes=1e15, bandwidth=1.0)
    apps = {node: answering_app(node, odd if node == 1 else None) for node in EXAMPLES}
    strategy = PartialUpdates(quiet(), config=quantile(0.5))
    run(strategy, apps, first_arrays(), 1)
    known = GroupNames(manifest())
    assert strategy.fleet.capabilities[1].model_bytes == known.model_bytes
    assert known.model_bytes == 4 * sum(array.size for array in first_weights().values())


@pytest.mark.parametrize("alone", [1, 2])
def test_where_nobody_keeps_a_deadline_of_claims_the_next_round_has_none(alone: int) -> None:
    """One or two devices have no majority: what they cannot keep is no deadline."""
    late: list[float | None] = []

    def lost(reply: Message) -> Message:
        if "fitres.parameters" not in reply.content or late[-1] is None:
            return reply
        answered = Message(Error(code=3, reason="too late"), reply_to=reply)
        answered.metadata.__dict__["_src_node_id"] = reply.metadata.src_node_id
        return answered

    class Noted(PartialUpdates):
        def configure_train(self, *arguments: Any, **options: Any) -> Any:
            found = super().configure_train(*arguments, **options)
            patience = self.patience()
            late.append(None if patience is None else patience / (reply_timeout(1.0) or 1.0))
            return found

    odd = {node: said(node, full_step_seconds=1e-9) for node in range(1, alone + 1)}
    apps = {node: answering_app(node, odd[node]) for node in odd}
    records: list[RoundRecord] = []
    strategy = Noted(
        quiet(nodes=alone, min_train_nodes=1), config=quantile(0.1), on_round=records.append
    )
    # Each message's configuration comes before any answer.
    late.append(1.0)
    run(strategy, apps, first_arrays(), 3, alter=lost)
    assert late[1] is not None and late[2] is None
    accepted = {record.server_round: len(record.accepted) for record in records}
    assert accepted.get(2) == alone


def test_a_device_that_did_not_answer_is_asked_again_ever_more_rarely() -> None:
    silent = {"left": 6}

    def failed(reply: Message) -> Message:
        from_one = reply.metadata.src_node_id == 1 and "evaluateres.metrics" in reply.content
        if not from_one or silent["left"] <= 0:
            return reply
        silent["left"] -= 1
        answered = Message(Error(code=2, reason="still profiling"), reply_to=reply)
        answered.metadata.__dict__["_src_node_id"] = 1
        return answered

    apps = {node: answering_app(node) for node in EXAMPLES}
    strategy = PartialUpdates(quiet(), config=quantile(0.5))
    _, grid = run(strategy, apps, first_arrays(), 12, alter=failed)
    # Rounds 1, 2, 4, 7 (one, two, four left alone in between) and 12.
    assert questions(grid).count(1) == 5
    assert all(questions(grid).count(node) == 1 for node in (2, 3, 4))
    silent["left"] = 0
    run(strategy, apps, first_arrays(), 9, alter=failed)
    assert 1 in strategy.fleet.capabilities


def test_the_servers_clock_bounds_claims_from_below() -> None:
    terms = RoundConfig(deadline=Deadline(quantile=0.5))
    strategy = PartialUpdates(quiet(), config=terms)
    strategy.fleet.capabilities = {node: capabilities(node) for node in EXAMPLES}
    assert strategy.fleet.deadline_seconds() == 30.0
    for node in EXAMPLES:
        strategy.fleet.availability.heard(node, 50.0)
    assert strategy.fleet.deadline_seconds() == 50.0


def test_inner_times_leave_out_a_fifth_at_either_end() -> None:
    assert inner_times([]) == [] and inner_times([3.0]) == [3.0]
    assert inner_times([5.0, 1.0]) == [1.0, 5.0]
    assert inner_times([5.0, 1e30, 1e-9]) == [5.0] * 3
    eleven = inner_times([1e-9] * 3 + [float(n) for n in range(1, 9)])
    assert eleven == [1.0] * 4 + [2.0, 3.0, 4.0] + [5.0] * 4


# Group names, importance.


def known() -> GroupNames:
    return GroupNames(manifest())


def test_only_importance_of_possible_groups_is_read() -> None:
    assert read_importance('{"head": 3, "stem": 1}', known()) == {"head": 0.75, "stem": 0.25}
    assert read_importance('{"head": 3, "evil": 1}', known()) == {}
    many = json.dumps({f"head#{n}": 1.0 for n in range(2, 400_000)})
    assert read_importance(many, known()) == {}
    assert read_importance(json.dumps({"head": 1.0, "x" * 2_000_000: 1.0}), known()) == {}


@pytest.mark.parametrize("plan", ["local", "server"])
def test_foreign_names_stay_nowhere(plan: Any) -> None:
    seen: dict[int, list[dict[str, Any]]] = {}
    names = {n: json.dumps({f"head#{n * i}": 1.0 for i in range(2, 6)}) for n in EXAMPLES}
    reported = {
        1: json.dumps({f"evil-{i}": 1.0 for i in range(8_000)} | {"y" * 2_000_000: 1.0}),
        2: json.dumps({"head": 1.0}),
        3: json.dumps({f"foreign-{i}": 1.0 for i in range(100)}),
    }
    strategy = PartialUpdates(quiet(), config=RoundConfig(plan=plan))
    run(strategy, watched(seen, reported), first_arrays(), 3)
    assert strategy.fleet.importance == ({"head": 1.0} if plan == "server" else {})
    size = len(archive_bytes(Kind("test"), to_archive(strategy.fleet.to_state())))
    assert size < 20_000
    # Nor do possible ones pile up.
    for _ in range(3):
        run(strategy, watched({}, names), first_arrays(), 1)
    assert len(strategy.fleet.importance) <= known().most


def test_importance_is_not_even_read_where_nobody_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    from fl_elastic.flower import reply_merger

    monkeypatch.setattr(reply_merger, "read_importance", lambda *a: read.append(a) or {})
    reported = {node: json.dumps({"head": 1.0}) for node in EXAMPLES}
    run(PartialUpdates(quiet()), watched({}, reported), first_arrays(), 1)
    assert read == []


def test_a_checkpoint_of_foreign_names_is_cleaned() -> None:
    strategy = PartialUpdates(quiet(), config=RoundConfig(plan="server"))
    importance = dict.fromkeys(["head", *(f"evil{i}" for i in range(1000))], 1.0)
    strategy.fleet.restore(replace(strategy.fleet.to_state(), importance=importance))
    seen: dict[int, list[dict[str, Any]]] = {}
    run(strategy, watched(seen), first_arrays(), 1)
    assert strategy.fleet.importance == {"head": 1.0}


# Plans of the server.


def costs(names: tuple[str, ...] = ("head", "stem", "scale"), scale: float = 1.0) -> GroupCosts:
    each = (scale,) * len(names)
    return GroupCosts(names, each, each, (4.0,) * len(names), scale, 0)


def device(groups: GroupCosts, allowed: float = 5.0, step: float = 7.0) -> Capabilities:
    return Capabilities("pi", 10, 4, step, 100.0, 0.0, allowed, groups)


HONEST = [device(costs(), 5.5 + 0.5 * n) for n in range(4)]
LIARS = {
    "foreign names": device(costs(("evil",))),
    "a thousand seconds a group": device(costs(scale=1e9), step=3e9),
    "other names": device(costs(("head", "stem"))),
    "nothing allowed": device(costs(), 1e-9),
    "no time at all": device(costs(scale=0.0), 1e9),
}


@pytest.mark.parametrize("liar", LIARS)
@pytest.mark.parametrize("place", [0, 2, 4])
def test_one_that_lies_about_costs_does_not_plan_for_all(liar: str, place: int) -> None:
    cohort = [*HONEST[:place], LIARS[liar], *HONEST[place:]]
    worth = {"head": 0.3, "stem": 0.3, "scale": 0.4}
    honest = {ServerPlanner().choose([each], worth) for each in HONEST}
    found = ServerPlanner().choose(cohort, worth)
    assert found in honest
    assert set(found) <= {"head", "stem", "scale"} and len(found) > 1


def test_costs_of_groups_that_the_model_cannot_have_are_dropped() -> None:
    assert device(costs(("evil",))).bounded(known()).groups is None
    assert device(costs()).bounded(known()).groups == costs()
    assert device(costs()).bounded(None).groups == costs()


# Metrics.


def test_metrics_are_few_short_and_apart() -> None:
    metrics: dict[str, Any] = {f"m{i}": float(i) for i in range(5000)}
    assert len(believed_metrics(metrics)) == 256
    odd = {
        "x" * 201: 1.0,
        "": 1.0,
        "new\nline": 1.0,
        "\x1b[31mred": 1.0,
        "turned\u202eround": 1.0,
        "half\ud800": 1.0,
        "huge": 10**400,
        "nan": float("nan"),
        "fl_elastic.have": 3,
    }
    assert believed_metrics(odd) == {}
    said = left_out_of(odd | {f"m{i}": 1.0 for i in range(300)})
    assert "'new\\nline' (no name that can be shown)" in said and "44 beyond the first 256" in said
    assert said.isprintable() and len(said) < 600


# Silence.


def test_a_node_that_never_answers_costs_one_long_wait() -> None:
    availability = ClientAvailability()
    assert availability.patience([1, 2, 3]) is None
    waits = []
    for _ in range(40):
        asked = availability.due([1, 2, 3])
        waits.append(availability.patience(asked))
        availability.heard(1, 20.0)
        availability.heard(2, 30.0)
        availability.passed_over({1, 2, 3} - asked)
        if 3 in asked:
            availability.missed(3)
        assert {1, 2} <= asked
    assert waits[0] is None and waits[1] == 300.0
    assert not availability.awaits(3) and availability.awaits(1)


def test_a_silent_node_is_sent_work_ever_more_rarely_until_it_answers() -> None:
    strategy = PartialUpdates(quiet())
    for _ in range(4):
        strategy.availability.missed(1)
    apps = {node: answering_app(node) for node in EXAMPLES}
    _, grid = run(strategy, apps, first_arrays(), 7)
    asked = [m.metadata.dst_node_id for m in grid.sent if m.metadata.message_type == "train"]
    # Four rounds without it; in the fifth it answers, and takes part again.
    assert [asked.count(node) for node in EXAMPLES] == [3, 7, 7, 7]


def test_who_answers_again_is_waited_for_again() -> None:
    availability = ClientAvailability()
    for _ in range(8):
        availability.missed(3)
    for node in (1, 2, 4):
        availability.heard(node, 5.0)
    asked = []
    for _ in range(70):
        asked.append(3 in availability.due([1, 3]))
        availability.passed_over([] if asked[-1] else [3])
    assert any(asked) and not all(asked)
    availability.heard(3, 400.0)
    assert availability.awaits(3) and availability.due([1, 3]) == {1, 3}
    # It usually takes that long.
    assert availability.patience([1, 3]) == 1200.0


def test_if_all_are_silent_all_are_asked() -> None:
    availability = ClientAvailability()
    for _ in range(9):
        for node in (1, 2):
            availability.missed(node)
    assert availability.due([1, 2]) == {1, 2}


def test_the_fleet_remembers_no_more_names_than_the_model_has_groups() -> None:
    registry = ClientRegistry(RoundConfig(plan="server"))
    names = "conv.weight", "conv.bias"
    registry.serve(Manifest(names, ((1,),) * 2, ("float32",) * 2, (Role.PARAMETER,) * 2))
    # Names that groups can have, two by each of three clients.
    registry.weigh(
        [
            {"conv": 0.9, "conv#2": 0.1},
            {"conv.weight": 0.8, "conv.bias": 0.2},
            {"conv.weight#2": 0.6, "conv.bias#2": 0.4},
        ]
    )
    assert set(registry.importance) == {"conv", "conv.weight"}
