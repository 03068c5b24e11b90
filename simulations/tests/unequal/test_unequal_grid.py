"""The layer around Flower's grid: simulated time, order, who does not answer, and nothing else changed."""

from __future__ import annotations

import csv
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg as LegacyFedAvg
from flwr.server.workflow import DefaultWorkflow
from flwr.serverapp.strategy import FedAvg
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_apps import app, arrays, busy, fleet
from slow_clock import walked

from fl_elastic.aggregation import MergeOptions
from fl_elastic.errors import ScenarioError
from fl_elastic.flower import Checkpointed, Deadline, PartialUpdates, RoundConfig, RoundRecord
from fl_elastic.flower._compat import NumPyClient
from fl_elastic.flower.incremental_grid import IncrementalGrid
from fl_elastic_simulations.engine.in_process_grid import InProcessGrid
from fl_elastic_simulations.unequal import Fleet, UnequalGrid, measuring_mod
from fl_elastic_simulations.unequal.clock import RoundCost
from fl_elastic_simulations.unequal.costs import HostCost
from fl_elastic_simulations.unequal.fleet import AvailabilitySection, CostSection
from fl_elastic_simulations.unequal.measuring import RECORD
from fl_elastic_simulations.unequal.outcome import Outcome


class Watched(FedAvg):
    """Notes from which nodes, with what, replies to training came."""

    def __init__(self) -> None:
        super().__init__(min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=1)
        self.nodes: list[list[int]] = []
        self.errors: list[str] = []
        self.keys: set[str] = set()

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = list(replies)
        good = [each for each in replies if not each.has_error()]
        self.nodes.append([each.metadata.src_node_id for each in good])
        self.errors += [each.error.reason for each in replies if each.has_error()]
        self.keys |= {key for each in good for key in each.content}
        return super().aggregate_train(server_round, replies)


def ran(
    made: Fleet,
    *,
    rounds: int = 1,
    timeout: float | None = None,
    client: ClientApp | None = None,
    least: int = 1,
) -> tuple[UnequalGrid, Watched, Any]:
    inner = InProcessGrid(len(made.clients), client or app())
    grid, strategy = UnequalGrid(inner, made, min_available_nodes=least), Watched()
    result = strategy.start(grid, arrays(0.0, 1.0), num_rounds=rounds, timeout=timeout)  # type: ignore[arg-type]
    return grid, strategy, result


@pytest.mark.parametrize("timeout", [None, 100.0])
def test_where_nobody_is_late_the_result_is_that_of_the_plain_run(timeout: float | None) -> None:
    _, strategy, result = ran(fleet(8.0, 1.0, 4.0), rounds=3, timeout=timeout)
    plain = Watched().start(InProcessGrid(3, app(mods=())), arrays(0.0, 1.0), num_rounds=3)
    np.testing.assert_allclose(
        result.arrays["weight"].numpy(), plain.arrays["weight"].numpy(), rtol=1e-12
    )
    assert result.train_metrics_clientapp[3] == pytest.approx(plain.train_metrics_clientapp[3])
    assert result.evaluate_metrics_clientapp == plain.evaluate_metrics_clientapp
    assert strategy.keys == {"arrays", "metrics"}


def test_an_app_sees_what_the_strategy_sent_and_the_device_that_it_plays() -> None:
    seen: list[tuple[set[str], dict[str, Any], set[str]]] = []

    def note(message: Message, context: Context) -> None:
        seen.append(
            (set(message.content), dict(context.node_config), set(message.content["config"]))
        )

    ran(fleet(2.0, 3.0, memory=(None, 10**9)), client=app(note))
    assert len(seen) == 4
    assert all(
        keys == {"arrays", "config"} and "server-round" in config for keys, _, config in seen
    )
    of = {config["partition-id"]: config for _, config, _ in seen}
    assert of[0]["slowdown"] == 2.0 and of[1]["slowdown"] == 3.0
    assert "memory" not in of[0] and of[1]["memory"] == 1e9


def test_the_strategys_messages_stay_its_own() -> None:
    grid = UnequalGrid(InProcessGrid(2, app()), fleet(1.0, 2.0))
    content = RecordDict({"arrays": arrays(0.0), "config": ConfigRecord({"server-round": 7})})
    sent = [Message(content, node, "train") for node in grid.get_node_ids()]
    replies = grid.send_and_receive(sent)
    assert list(content) == ["arrays", "config"]
    assert [each.metadata.src_node_id for each in replies] == [1, 2]
    assert all(RECORD not in each.content for each in replies)
    assert {row.server_round for row in grid.rows} == {7}


def test_without_given_costs_the_processor_time_is_measured() -> None:
    def work(message: Message, context: Context) -> None:
        if message.metadata.message_type == "train":
            busy(0.05 * (1 + int(context.node_config["partition-id"])))

    grid, _, _ = ran(fleet(1.0, 2.0, costs={}), client=app(work))
    found = {row.client: row.compute_seconds for row in grid.rows if row.message_type == "train"}
    assert 0.05 <= found[0] < 0.15 and 0.2 <= found[1] < 0.4
    tested = [row.compute_seconds for row in grid.rows if row.message_type == "evaluate"]
    assert 0 < max(tested) < 0.05


def test_who_has_too_little_memory_fails_and_the_others_go_on() -> None:
    given = {"train": CostSection(1.0, peak_bytes=2e9), "evaluate": CostSection()}
    _, strategy, _ = ran(fleet(1.0, 2.0, memory=(10**9, 4 * 10**9), costs=given))
    assert strategy.nodes == [[2]]
    assert strategy.errors == [
        "client 0 (laptop, slowdown 1, memory in bytes 1000000000) is out of memory: it takes 2000 MB, there are "
        "1000 MB"
    ]


def test_the_memory_that_a_message_takes_is_measured() -> None:
    def work(message: Message, context: Context) -> None:
        if message.metadata.message_type == "train":
            np.ones(10_000_000 * (1 + int(context.node_config["partition-id"]))).sum()

    grid, strategy, _ = ran(fleet(1.0, 1.0, memory=(None, 120_000_000)), client=app(work))
    # Also where the seconds are given, unless the bytes are.
    assert strategy.nodes == [[1]]
    peaks = {row.client: row.peak_bytes for row in grid.rows if row.message_type == "train"}
    assert peaks == pytest.approx({0: 80e6, 1: 160e6}, rel=0.1)


def traced(path: Path, text: str, repeat: float | None = None) -> AvailabilitySection:
    path.write_text("client,from,to\n" + text)
    return AvailabilitySection(trace=str(path), repeat_seconds=repeat)


def test_time_passes_until_enough_devices_are_there(tmp_path: Path) -> None:
    section = traced(tmp_path / "trace.csv", "0,0,9.5\n1,8,20\n", repeat=30.0)
    grid, strategy, _ = ran(fleet(1.0, 1.0, availability=section), least=2, rounds=3)
    # In the second round one goes away; then both are there a period later.
    assert strategy.nodes == [[1, 2], [2], [1, 2]]
    assert {round(row.sent, 3) for row in grid.rows if row.message_type == "train"} == {8, 9, 38}
    never = traced(tmp_path / "never.csv", "0,0,10\n1,10,20\n", repeat=30.0)
    with pytest.raises(ScenarioError, match="never there at the same time, at most 1"):
        ran(fleet(1.0, 1.0, availability=never), least=2)


@pytest.mark.parametrize("ends", [100, 50])
def test_a_strategy_that_waits_for_more_devices_than_the_layer_is_not_left_waiting(
    ends: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower looks again each second, in which no simulated time would pass."""
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        assert len(looks) < 50

    monkeypatch.setattr("flwr.serverapp.strategy.strategy_utils.sleep", sleep)
    section = traced(tmp_path / "trace.csv", f"0,0,{ends}\n1,0,100\n2,60,100\n", repeat=100.0)
    grid = UnequalGrid(InProcessGrid(3, app()), fleet(1.0, 1.0, 1.0, availability=section))
    strategy = FedAvg(min_available_nodes=3, fraction_evaluate=0.0)
    if ends == 50:
        with pytest.raises(ScenarioError, match="3 devices are never there at the same time"):
            strategy.start(grid, arrays(0.0), num_rounds=1)
        return
    strategy.start(grid, arrays(0.0), num_rounds=2)
    assert [round(row.sent, 3) for row in grid.rows] == [60.0] * 2 + [61.0] * 3


def test_who_looks_from_another_thread_makes_no_time_pass(tmp_path: Path) -> None:
    """As Flower's older server does every few seconds, however long the host takes for a round."""
    section = traced(tmp_path / "trace.csv", "0,0,100\n1,60,100\n", repeat=100.0)
    grid = UnequalGrid(
        InProcessGrid(2, app()), fleet(1.0, 1.0, availability=section), min_available_nodes=1
    )
    looking = threading.Thread(target=lambda: [grid.get_node_ids() for _ in range(50)])
    looking.start()
    looking.join()
    assert list(grid.get_node_ids()) == [1] and grid.now == 0.0


def test_a_loop_that_pulls_gets_the_replies_one_by_one_in_simulated_order() -> None:
    grid = UnequalGrid(InProcessGrid(3, app()), fleet(5.0, 2.0, 1.0))
    nodes = list(grid.get_node_ids())

    def push(node: int) -> str:
        (name,) = grid.push_messages([Message(RecordDict({"arrays": arrays(0.0)}), node, "train")])
        return name

    waiting = {push(node) for node in nodes}
    came: list[tuple[int, float]] = []
    while len(came) < 7:
        for reply in grid.pull_messages(waiting):
            waiting.remove(reply.metadata.reply_to_message_id)
            came.append((reply.metadata.src_node_id, round(grid.now, 3)))
            waiting.add(push(reply.metadata.src_node_id))
    # Asynchronous: the fast one answers five times while the slow one works on its first message.
    assert came[:2] == [(3, 1.0), (2, 2.0)] or came[:2] == [(3, 1.0), (3, 2.0)]
    by_node = {node: [at for each, at in came if each == node] for node in nodes}
    assert by_node[3] == [1.0, 2.0, 3.0, 4.0] and by_node[2] == [2.0, 4.0]
    assert [at for _, at in came] == sorted(at for _, at in came)


def test_a_round_between_pushes_waits_for_devices_that_are_still_busy() -> None:
    grid = UnequalGrid(InProcessGrid(2, app()), fleet(5.0, 1.0))

    def to(node: int) -> Message:
        return Message(RecordDict({"arrays": arrays(0.0)}), node, "train")

    names = list(grid.push_messages([to(1)]))
    replies = grid.send_and_receive([to(1), to(2)])
    # Device 1 is busy until second 5, and takes five more seconds for the second message.
    assert [row.arrival for row in grid.rows] == pytest.approx([1.0, 10.0])
    assert [each.metadata.src_node_id for each in replies] == [2, 1] and grid.now == pytest.approx(
        10.0
    )
    (pushed,) = grid.pull_messages(names)
    assert pushed.metadata.reply_to_message_id == names[0]
    assert grid.rows[-1].arrival == pytest.approx(5.0) and grid.now == pytest.approx(10.0)


def test_a_message_to_a_node_that_plays_no_device_is_refused() -> None:
    grid = UnequalGrid(InProcessGrid(2, app()), fleet(1.0, 1.0))
    message = Message(RecordDict({"arrays": arrays(0.0)}), 77, "train")
    for send in (grid.push_messages, grid.send_and_receive):
        with pytest.raises(ScenarioError, match="node 77, which plays no device of the fleet"):
            send([message])


def test_the_rows_are_a_table(tmp_path: Path) -> None:
    grid, _, _ = ran(fleet(1.0, 4.0), timeout=1.9)
    with grid.save(tmp_path / "rows.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert [row["outcome"] for row in rows] == ["answered", "late", "answered", "late"]
    assert float(rows[1]["arrival"]) == pytest.approx(4.0, rel=1e-6)
    assert rows[0]["device"] == "laptop, slowdown 1"


def test_a_strategy_and_clients_of_the_older_kind_work_too() -> None:
    class Adding(NumPyClient):
        def __init__(self, partition: int) -> None:
            self.partition = partition

        def fit(self, parameters: Any, config: Any) -> Any:
            return [parameters[0] + self.partition + 1], 10 * (self.partition + 1), {}

        def evaluate(self, parameters: Any, config: Any) -> Any:
            return 0.0, 10, {}

    class WithRun(InProcessGrid):
        run = SimpleNamespace(run_id=1)

    client = ClientApp(
        lambda context: Adding(int(context.node_config["partition-id"])).to_client(),
        mods=[measuring_mod],
    )
    start = ndarrays_to_parameters([np.zeros(2)])
    given = {"train": CostSection(0.5, seconds_per_example=0.1), "evaluate": CostSection()}
    grid = UnequalGrid(WithRun(2, client), fleet(4.0, 1.0, costs=given))
    context = LegacyContext(
        Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={}),
        ServerConfig(num_rounds=2), LegacyFedAvg(initial_parameters=start),
    )  # fmt: skip
    DefaultWorkflow()(grid, context)
    fits = [row for row in grid.rows if row.message_type == "train"]
    assert [row.client for row in fits] == [1, 0] * 2
    assert [row.compute_seconds for row in fits] == pytest.approx([2.5, 6.0] * 2)


def test_an_app_that_does_not_measure_is_named() -> None:
    with pytest.raises(ScenarioError, match=r"2 of 2 nodes do not measure.*mods=\[measuring_mod\]"):
        ran(fleet(1.0, 2.0), client=app(mods=()))


def test_a_mod_that_answers_before_the_measuring_one_is_told_its_place() -> None:
    """As Flower's secure aggregation does, which lets only other messages pass."""

    def answers(message: Message, context: Context, call_next: Any) -> Message:
        if message.metadata.message_type == "train":
            return Message(RecordDict({"said": MetricRecord({"n": 1.0})}), reply_to=message)
        reply: Message = call_next(message, context)
        return reply

    with pytest.raises(ScenarioError, match="type 'train': give its app the mod, before any other"):
        ran(fleet(1.0, 2.0), client=app(mods=(answers, measuring_mod)))


def test_a_fleet_of_another_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_elastic_simulations.unequal.grid._CONNECT_SECONDS", 0.0)
    for nodes in (1, 3):
        grid = UnequalGrid(InProcessGrid(nodes, app()), fleet(1.0, 2.0))
        with pytest.raises(ScenarioError, match=f"2 devices and Flower {nodes} nodes"):
            grid.get_node_ids()
    with pytest.raises(ScenarioError, match="min_available_nodes 3"):
        UnequalGrid(InProcessGrid(2, app()), fleet(1.0, 2.0), min_available_nodes=3)


def test_a_client_that_fails_is_a_failure_like_any_other() -> None:
    def fail(message: Message, context: Context) -> None:
        if context.node_config["partition-id"] == 0:
            raise RuntimeError("no data")

    grid, strategy, _ = ran(fleet(1.0, 2.0), client=app(fail))
    assert strategy.nodes == [[2]] and strategy.errors == ["RuntimeError('no data')"]
    assert [row.outcome for row in grid.rows if row.client == 0] == ["failed", "failed"]


def test_a_host_that_is_lost_ends_the_run_instead_of_a_device() -> None:
    class Dying(InProcessGrid):
        def send_and_receive(self, messages: Iterable[Message], **options: Any) -> Any:
            for reply, message in zip(super().send_and_receive(messages), messages, strict=True):
                lost = "config" in message.content
                yield (
                    Message(Error(0, "ActorDiedError\n\nand more"), reply_to=message)
                    if lost
                    else reply
                )

    grid = UnequalGrid(Dying(1, app()), fleet(1.0), min_available_nodes=1)
    with pytest.raises(ScenarioError, match=r"client 0 was not handled.*ActorDiedError; run again"):
        Watched().start(grid, arrays(0.0), num_rounds=1)


def test_apps_that_only_answer_queries_are_known_too() -> None:
    client = ClientApp(mods=app()._mods)

    @client.query()
    def query(message: Message, context: Context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"mean": 1.0})}), reply_to=message)

    grid = UnequalGrid(InProcessGrid(2, client), fleet(1.0, 2.0, costs={"query": CostSection(1.0)}))
    sent = [Message(RecordDict(), node, "query") for node in grid.get_node_ids()]
    assert [each.metadata.src_node_id for each in grid.send_and_receive(sent)] == [1, 2]
    assert grid.now == pytest.approx(2.0, rel=1e-6)


def test_messages_carry_the_ids_to_which_replies_refer_as_on_flowers_grid(tmp_path: Path) -> None:
    """Also those to a device that is away, and which Flower never sees."""
    section = traced(tmp_path / "trace.csv", "0,0,9\n1,0,1\n", repeat=10.0)
    for pushed in (False, True):
        grid = UnequalGrid(InProcessGrid(2, app()), fleet(1.0, 1.0, availability=section))
        nodes = list(grid.get_node_ids())
        grid.clock.wait_until(1.5)
        sent = [Message(RecordDict({"arrays": arrays(0.0)}), node, "train") for node in nodes]
        if pushed:
            names = list(grid.push_messages(sent))
            replies = [each for _ in sent for each in grid.pull_messages(names)]
            assert [each.metadata.message_id for each in sent] == names
        else:
            replies = grid.send_and_receive(sent)
        of = {each.metadata.message_id: each.metadata.dst_node_id for each in sent}
        assert [of[each.metadata.reply_to_message_id] for each in replies] == [2, 1]
        assert [each.has_error() for each in replies] == [True, False]


def own_types() -> ClientApp:
    """As vertical federated learning has it: messages of types of its own alone."""
    client = ClientApp(mods=[measuring_mod])

    @client.query("embed")
    def embed(message: Message, context: Context) -> Message:
        return Message(RecordDict({"arrays": arrays(context.node_id)}), reply_to=message)

    @client.train("apply")
    def apply(message: Message, context: Context) -> Message:
        return Message(message.content, reply_to=message)

    return client


def test_an_app_with_message_types_of_its_own_alone_is_simulated(tmp_path: Path) -> None:
    given = {"query": CostSection(1.0), "train": CostSection(0.5)}
    grid = UnequalGrid(InProcessGrid(2, own_types()), fleet(4.0, 1.0, costs=given))
    came = []
    for kind in ("query.embed", "train.apply"):
        content = RecordDict({"arrays": arrays(7.0, 8.0), "config": ConfigRecord({"n": 1})})
        sent = [Message(content, node, kind) for node in grid.get_node_ids()]
        for reply in grid.send_and_receive(sent):
            (array,) = reply.content.array_records["arrays"].values()
            came.append((reply.metadata.src_node_id, array.numpy().tolist()))
    # A reply may hold the records of the message.
    assert came == [(2, [2.0]), (1, [1.0]), (2, [7.0, 8.0]), (1, [7.0, 8.0])]
    assert grid.now == pytest.approx(4.0 + 2.0)
    sizes = [(row.downlink_bytes, row.uplink_bytes) for row in grid.rows[2:]]
    assert sizes[0] == sizes[1] and sizes[0][0] == sizes[0][1]
    section = traced(tmp_path / "trace.csv", "0,0,9\n1,0,1\n")
    coming = UnequalGrid(InProcessGrid(2, own_types()), fleet(1.0, 1.0, availability=section))
    with pytest.raises(ScenarioError, match=r"a function for one of .* train, evaluate, query"):
        coming.get_node_ids()


def test_what_flower_knows_of_the_nodes_is_passed_on(tmp_path: Path) -> None:
    class Knowing(InProcessGrid):
        def get_nodes(self) -> list[Any]:
            return [SimpleNamespace(node_id=node, owner_name=f"owner {node}") for node in (1, 2)]

    section = traced(tmp_path / "trace.csv", "0,2,9\n1,0,9\n")
    grid = UnequalGrid(
        Knowing(2, app()), fleet(1.0, 1.0, availability=section), min_available_nodes=1
    )
    assert [each.owner_name for each in grid.get_nodes()] == ["owner 2"]
    assert [each.owner_name for each in IncrementalGrid(Knowing(2, app())).get_nodes()] == [
        "owner 1", "owner 2",
    ]  # fmt: skip


pairs = st.lists(st.integers(0, 20), unique=True, min_size=2, max_size=4).map(sorted)


@settings(max_examples=60)
@given(
    devices=st.lists(st.tuples(st.integers(1, 5), pairs), min_size=1, max_size=4),
    timeout=st.none() | st.integers(1, 6),
    host=st.lists(st.integers(0, 3), min_size=4, max_size=4),
)
def test_rounds_on_any_fleet_are_those_of_an_event_list(
    devices: list[tuple[int, list[int]]], timeout: int | None, host: list[int]
) -> None:
    path = Path(tempfile.mkdtemp()) / "trace.csv"
    lines = [
        f"{client},{begins},{ends}\n"
        for client, (_, times) in enumerate(devices)
        for begins, ends in zip(times[::2], times[1::2], strict=False)
    ]
    section = traced(path, "".join(lines), repeat=20.0)
    made = fleet(*(float(slowdown) for slowdown, _ in devices), availability=section)
    grid = UnequalGrid(
        InProcessGrid(len(devices), app()), made, min_available_nodes=1,
        costs=lambda *_: HostCost(float(seconds), 0.0, 0.0, 0.0),
    )  # fmt: skip
    there, now, free = made.availabilities, 0, [0] * len(devices)
    for seconds in host:
        while not any(each.there(now) for each in there):
            now += 1
        nodes = list(grid.get_node_ids())
        assert nodes == [client + 1 for client, each in enumerate(there) if each.there(now)]
        assert grid.now == now
        events = []
        for node in nodes:
            took = float(devices[node - 1][0] * seconds)
            met = walked(now, RoundCost(took, 0, 0), there[node - 1], free[node - 1], 0, None)
            events.append((met.arrival, node, met.outcome))
            free[node - 1] = int(met.arrival)
        events.sort()
        timely = [each for each in events if timeout is None or each[0] - now <= timeout]
        sent = [Message(RecordDict({"arrays": arrays(0.0)}), node, "train") for node in nodes]
        replies = grid.send_and_receive(sent, timeout=timeout)
        assert [(each.metadata.src_node_id, each.has_error()) for each in replies] == [
            (node, outcome is Outcome.AWAY) for _, node, outcome in timely
        ]
        last = int(max((each[0] for each in timely), default=now))
        now = last if len(timely) == len(events) or timeout is None else now + timeout
        assert grid.now == now


@pytest.mark.parametrize("saved", [False, True])
def test_the_patience_of_one_strategy_is_not_that_of_the_next(saved: bool, tmp_path: Path) -> None:
    """As where an app compares methods one after the other on the same grid."""
    client = ClientApp(mods=[measuring_mod])

    @client.train()
    def train(message: Message, context: Context) -> Message:
        trained = arrays(*(message.content["arrays"]["weight"].numpy() + context.node_id))
        metrics = MetricRecord({"num-examples": 10})
        return Message(RecordDict({"arrays": trained, "metrics": metrics}), reply_to=message)

    grid = UnequalGrid(InProcessGrid(3, client), fleet(1.0, 2.0, 16.0), min_available_nodes=3)
    inner = FedAvg(min_available_nodes=3, fraction_evaluate=0.0)
    terms = RoundConfig(deadline=Deadline(seconds=4.0))
    strategy = PartialUpdates(inner, config=terms)
    first = Checkpointed(strategy, tmp_path) if saved else strategy
    first.start(grid, arrays(1.0), num_rounds=1)
    assert grid.now == pytest.approx(6.0)
    result = FedAvg(min_available_nodes=3, fraction_evaluate=0.0).start(
        grid, arrays(1.0), num_rounds=1
    )
    # The third device is busy until second 16, and then takes as long again.
    assert grid.now == pytest.approx(32.0)
    assert [row.outcome for row in grid.rows[-3:]] == ["answered"] * 3
    # The mean of 1, 2 and 3 is added.
    assert result.arrays["weight"].numpy().tolist() == [3.0]


def test_a_round_ends_when_the_wrapped_strategy_stops_waiting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As on real devices: a deadline of four seconds, half as much again for the way, and a client of sixteen."""
    made, client = fleet(1.0, 2.0, 16.0), ClientApp(mods=[measuring_mod])

    @client.train()
    def train(message: Message, context: Context) -> Message:
        trained = arrays(*(message.content["arrays"]["weight"].numpy() + 1.0))
        metrics = MetricRecord({"num-examples": 10})
        return Message(RecordDict({"arrays": trained, "metrics": metrics}), reply_to=message)

    terms = RoundConfig(deadline=Deadline(seconds=4.0))
    inner = FedAvg(min_available_nodes=3, fraction_evaluate=0.0)
    merged: list[list[int]] = []

    def note(record: RoundRecord) -> None:
        merged.append(sorted(each.node_id for each in record.accepted))

    for late in ("drop", "merge"):
        grid = UnequalGrid(InProcessGrid(3, client), made, min_available_nodes=3)
        strategy = PartialUpdates(inner, config=terms, merge=MergeOptions(late=late), on_round=note)  # type: ignore[arg-type]
        strategy.start(grid, arrays(0.0, 1.0), num_rounds=1)
        assert grid.now == pytest.approx(6.0)
        trained = [row for row in grid.rows if row.message_type == "train"]
        assert [row.outcome for row in trained if row.client == 2][-1:] == ["late"]
    assert merged == [[1, 2], [1, 2]]
    said = [each for each in caplog.records if "has no effect on UnequalGrid" in each.getMessage()]
    assert len(said) == 1
