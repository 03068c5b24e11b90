"""Replies are handed over as they come, one at a time, and those that come too late are not lost."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Strategy
from flwr.supercore.task_identity import TaskIdentity
from in_process_grid import InProcessGrid
from scripted_clients import EXAMPLES, first_arrays, first_weights, manifest, scripts
from small_federation import as_weights, assert_identical, quiet, scripted_app

from fl_elastic.aggregation import MergeOptions
from fl_elastic.flower import Checkpointed, Deadline, PartialUpdates, RoundConfig, RoundRecord
from fl_elastic.flower.client_availability import ClientAvailability
from fl_elastic.flower.incremental_grid import IncrementalGrid, Interrupted, incremental
from fl_elastic_simulations.engine.in_process_grid import InProcessGrid as LocalGrid
from fl_elastic_simulations.engine.simulate import ReportingGrid


def message(number: int, kind: str = "train") -> Message:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 1
    made = Message(RecordDict(), dst_node_id=number, message_type=kind)
    made.metadata.__dict__["_message_id"] = f"{kind}-{number}"
    return made


class Scripted(Grid):
    """Answers each message at a given look at the grid, by its identity; ``never`` without an entry."""

    def __init__(self, at_look: dict[str, int]) -> None:
        self.at_look = at_look
        self.looks = 0
        self.asked: list[list[str]] = []
        self._sent: dict[str, Message] = {}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        pushed = {each.metadata.message_id: each for each in messages}
        self._sent |= pushed
        return list(pushed)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self.looks += 1
        self.asked.append(list(message_ids))
        ready = [
            each for each in self.asked[-1]
            if each in self._sent and self.at_look.get(each, 10**9) <= self.looks
        ]  # fmt: skip
        return [Message(RecordDict({"a": big()}), reply_to=self._sent.pop(each)) for each in ready]

    def send_and_receive(self, *arguments: Any, **options: Any) -> Iterable[Message]:
        raise AssertionError("replaced by the wrapper")

    def get_node_ids(self) -> Iterable[int]:
        return [1, 2, 3]

    def set_run(self, run: object) -> None: ...

    @property
    def run(self) -> str:
        return "the run"

    def create_message(self, *arguments: Any, **options: Any) -> Message:
        raise AssertionError("not used")


def big() -> ArrayRecord:
    return ArrayRecord({"a": Array(np.zeros(10))})


def answers(replies: Iterable[Message]) -> list[str]:
    return [reply.metadata.reply_to_message_id for reply in replies]


def test_each_reply_comes_as_soon_as_it_is_there() -> None:
    grid = Scripted({"train-1": 3, "train-2": 1, "train-3": 2})
    replies = iter(IncrementalGrid(grid).send_and_receive([message(n) for n in (1, 2, 3)]))
    seen = []
    for reply in replies:
        seen.append((reply.metadata.src_node_id, grid.looks))
    assert seen == [(2, 1), (3, 2), (1, 3)]
    # What has come is not asked for again.
    assert grid.asked == [["train-1", "train-2", "train-3"], ["train-1", "train-3"], ["train-1"]]


def test_messages_go_out_before_anybody_asks_for_replies() -> None:
    grid = Scripted({})
    sent: list[int] = []

    def lazy() -> Iterator[Message]:
        sent.append(1)
        yield message(1)

    IncrementalGrid(grid).send_and_receive(lazy())
    assert sent == [1]
    assert list(grid._sent) == ["train-1"]


def test_no_reply_is_held_on_to() -> None:
    grid = IncrementalGrid(Scripted({f"train-{n}": 1 for n in range(1, 6)}))
    alive: list[weakref.ref[Message]] = []
    for reply in grid.send_and_receive([message(n) for n in range(1, 6)]):
        gc.collect()
        # This one, and those that arrived together with it and wait for their turn.
        assert sum(ref() is not None for ref in alive) == 0
        alive.append(weakref.ref(reply))
        del reply


@pytest.mark.parametrize(
    ("timeout", "patience"), [(0.0, None), (None, 0.0), (0.0, 60.0), (60.0, 0.0)]
)
def test_when_time_is_up_there_is_one_last_look(
    timeout: float | None, patience: float | None
) -> None:
    grid = Scripted({"train-1": 1})
    streamed = IncrementalGrid(grid, patience=lambda: patience)
    replies = streamed.send_and_receive([message(1), message(2)], timeout=timeout)
    assert answers(replies) == ["train-1"]
    assert grid.looks == 1
    assert streamed.seconds_left() == 0


def test_patience_is_for_training_alone() -> None:
    grid = Scripted({"evaluate-1": 3})
    streamed = IncrementalGrid(grid, patience=lambda: 0.0)
    assert answers(streamed.send_and_receive([message(1, "evaluate")])) == ["evaluate-1"]


def test_without_limits_there_is_always_time() -> None:
    grid = IncrementalGrid(Scripted({"train-1": 2}))
    assert answers(grid.send_and_receive([message(1)])) == ["train-1"]
    assert grid.seconds_left() is None


def test_waiting_ends_once_the_run_is_stopped() -> None:
    stop = threading.Event()
    replies = iter(IncrementalGrid(Scripted({"train-1": 1}), stop=stop).send_and_receive(
        [message(1), message(2)]
    ))  # fmt: skip
    assert next(replies).metadata.src_node_id == 1
    stop.set()
    with pytest.raises(Interrupted):
        next(replies)


def test_messages_that_could_not_be_stored_are_not_waited_for() -> None:
    class Refusing(Scripted):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            first, *_ = super().push_messages(messages)
            return [first, None]  # type: ignore[list-item]

    replies = IncrementalGrid(Refusing({"train-1": 1})).send_and_receive([message(1), message(2)])
    assert answers(replies) == ["train-1"]


def test_a_late_reply_comes_with_those_of_a_later_round() -> None:
    grid = Scripted({"train-2": 1, "train-1": 3, "evaluate-9": 2, "train-3": 3})
    streamed = IncrementalGrid(grid, late=True)
    first = streamed.send_and_receive([message(1), message(2)], timeout=0)
    assert answers(first) == ["train-2"]
    # An evaluation has nothing to do with it.
    assert answers(streamed.send_and_receive([message(9, "evaluate")])) == ["evaluate-9"]
    assert "train-1" not in grid.asked[-1]
    assert answers(streamed.send_and_receive([message(3)])) == ["train-3", "train-1"]
    assert grid.asked[-1] == ["train-3", "train-1"]
    # Once it has come it is asked for no more.
    assert answers(streamed.send_and_receive([message(4)], timeout=0)) == []
    assert grid.asked[-1] == ["train-4"]


def test_late_replies_are_dropped_unless_wanted() -> None:
    grid = Scripted({"train-2": 1, "train-1": 2, "train-3": 2})
    streamed = IncrementalGrid(grid)
    assert answers(streamed.send_and_receive([message(1), message(2)], timeout=0)) == ["train-2"]
    assert answers(streamed.send_and_receive([message(3)])) == ["train-3"]


@pytest.mark.parametrize("forget_after", [1, 3, 5])
def test_a_late_reply_is_forgotten_in_time(
    forget_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fl_elastic.flower.incremental_grid.FORGET_AFTER", forget_after)
    grid = Scripted({f"train-{n}": 0 for n in range(2, 12)})
    streamed = IncrementalGrid(grid, late=True)
    assert answers(streamed.send_and_receive([message(1)], timeout=0)) == []
    asked = []
    for number in range(2, 10):
        assert answers(streamed.send_and_receive([message(number)])) == [f"train-{number}"]
        asked.append("train-1" in grid.asked[-1])
    assert asked == [True] * forget_after + [False] * (8 - forget_after)


def test_what_streams_already_is_not_wrapped_again() -> None:
    strategy = PartialUpdates(quiet(), merge=LATE)
    plain = Scripted({})
    with incremental(plain, strategy) as wrapped:
        assert isinstance(wrapped, IncrementalGrid)
    reporting = ReportingGrid(plain, lambda *_: None)
    local = LocalGrid(1, scripted_app(manifest(), scripts()[1]))
    for grid in (wrapped, reporting, local):
        with incremental(grid, strategy) as streamed:
            assert streamed is grid
    # Other strategies may want their replies in a list.
    with incremental(plain, FedAvg()) as collected:
        assert collected is plain


class Slow(InProcessGrid):
    """Node 2 needs until the next round to answer."""

    def __init__(self, delayed: Callable[[Message], bool]) -> None:
        apps = {node: scripted_app(manifest(), update) for node, update in scripts().items()}
        super().__init__(len(EXAMPLES), apps.__getitem__)
        self._delayed = delayed
        self._round = 0

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = list(messages)
        if sent and sent[0].metadata.message_type == "train":
            self._round += 1
        numbers = list(super().push_messages(sent))
        for number, each in zip(numbers, sent, strict=True):
            if self._delayed(each):
                self._replies[number].metadata.__dict__["_not_before"] = self._round + 1
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        ready = [
            each for each in message_ids
            if each in self._replies
            and self._replies[each].metadata.__dict__.get("_not_before", 0) <= self._round
        ]  # fmt: skip
        return super().pull_messages(ready)


def node_2_in_rounds(late: int) -> Callable[[Message], bool]:
    """Its answers to the first rounds come one round later."""
    rounds: list[int] = []

    def delayed(message: Message) -> bool:
        if message.metadata.dst_node_id == 2:
            rounds.append(1)
        return message.metadata.dst_node_id == 2 and len(rounds) <= late

    return delayed


LATE = MergeOptions(late="merge")


def late_run(terms: RoundConfig, late: int = 1, **options: Any) -> tuple[list[RoundRecord], Any]:
    records: list[RoundRecord] = []
    strategy = PartialUpdates(quiet(), config=terms, on_round=records.append, **options)
    grid = Slow(node_2_in_rounds(late))
    return records, strategy.start(grid, first_arrays(), num_rounds=2, timeout=0.05)


@pytest.mark.parametrize("power", [0.0, 0.5, 2.0])
def test_a_late_update_is_merged_with_less_weight(power: float) -> None:
    merge = MergeOptions(late="merge", staleness_power=power)
    records, result = late_run(RoundConfig(), 2, merge=merge)
    assert [len(record.accepted) for record in records] == [3, 4]
    late = [reply for reply in records[1].accepted if reply.staleness]
    assert [(reply.node_id, reply.staleness, reply.downlink_bytes) for reply in late] == [(2, 1, 0)]
    assert not any(record.rejected for record in records)
    # By hand: "head.weight" is trained by all.
    weights = first_weights()
    updates = scripts()
    first = {node: updates[node](weights, 1) for node in EXAMPLES}
    early = [1, 3, 4]
    total = sum(EXAMPLES[node] for node in early)
    one = (
        weights["head.weight"]
        + sum(EXAMPLES[n] * first[n].deltas["head.weight"].astype(float) for n in early) / total
    )
    others = {n: np.zeros_like(w) for n, w in weights.items()} | {"head.weight": one}
    second = {n: updates[n](others, 2).deltas["head.weight"].astype(float) for n in early}
    weight = EXAMPLES[2] * 2.0**-power
    change = weight * first[2].deltas["head.weight"].astype(float)
    change += sum(EXAMPLES[n] * second[n] for n in early)
    expected = one + change / (weight + total)
    np.testing.assert_allclose(
        as_weights(result.arrays)["head.weight"], expected, rtol=1e-4, atol=1e-5
    )


def test_a_node_has_one_update_in_a_round_the_newest() -> None:
    records, _ = late_run(RoundConfig(), merge=LATE)
    second = records[1]
    assert sorted((each.node_id, each.staleness) for each in second.accepted) == [
        (1, 0), (2, 0), (3, 0), (4, 0),
    ]  # fmt: skip
    assert [(each.node_id, each.reason) for each in second.rejected] == [
        (2, "a newer update of it is merged")
    ]


def test_updates_that_were_held_back_do_not_arrive_as_many_voices() -> None:
    """Node 2 answers nothing for three rounds, and then everything at once."""

    class Withholding(Slow):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            numbers = list(super().push_messages(messages))
            for number in numbers:
                reply = self._replies[number]
                if reply.metadata.src_node_id == 2:
                    reply.metadata.__dict__["_not_before"] = 4 if self._round < 4 else 5
            return numbers

    records: list[RoundRecord] = []
    strategy = PartialUpdates(quiet(), merge=LATE, on_round=records.append)
    grid = Withholding(lambda _: False)
    strategy.start(grid, first_arrays(), num_rounds=4, timeout=0.05)
    late = [(each.node_id, each.staleness) for each in records[3].accepted if each.staleness]
    # It was not asked in the third round, as it had been silent.
    assert late == [(2, 2)]
    assert [each.node_id for each in records[3].rejected] == [2]


def test_a_late_update_is_left_out_if_not_wanted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "fl_elastic")
    records, _ = late_run(RoundConfig())
    assert [len(record.accepted) for record in records] == [3, 4]
    assert [record.silent for record in records] == [[2], []]
    assert (
        "round 1: 4 asked, 3 merged, 0 refused, 1 did not answer in time (nodes 2)" in caplog.text
    )
    assert "round 2: 4 asked, 4 merged, 0 refused" in caplog.text
    assert not any(record.rejected for record in records)


def test_the_line_of_a_round_counts_late_ones_apart(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "fl_elastic")
    late_run(RoundConfig(), 2, merge=LATE)
    assert "round 2: 4 asked, 3 merged, 1 late ones merged, 0 refused, 1 did not" in caplog.text


def test_a_round_waits_for_the_deadline_with_grace_and_no_longer() -> None:
    """The node that never answers in time would otherwise be waited for for an hour."""
    records: list[RoundRecord] = []
    terms = RoundConfig(deadline=Deadline(seconds=0.02))
    strategy = PartialUpdates(quiet(), config=terms, on_round=records.append)
    strategy.start(Slow(lambda each: each.metadata.dst_node_id == 2), first_arrays(), num_rounds=2)
    assert strategy.patience() == pytest.approx(0.03)
    assert [len(record.accepted) for record in records] == [3, 3]
    assert [record.deadline for record in records] == [0.02, 0.02]


def test_checkpointed_streams_too(tmp_path: Any) -> None:
    class Watched(PartialUpdates):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            kinds.append(isinstance(replies, list))
            return super().aggregate_train(server_round, replies)

    kinds: list[bool] = []
    strategy = Checkpointed(Watched(quiet()), tmp_path)
    grid = Slow(lambda _: False)
    found = strategy.start(grid, first_arrays(), num_rounds=2)
    assert kinds == [False, False]
    plain = PartialUpdates(quiet()).start(Slow(lambda _: False), first_arrays(), num_rounds=2)
    assert_identical(found.arrays, plain.arrays)


def test_a_silent_node_is_not_waited_for_in_every_round() -> None:
    """One long wait, whatever the limit of a round is; afterwards rounds end with those who answer."""
    availability = ClientAvailability(least=0.05)
    long = 0.6
    looks: list[int] = []
    for number in range(6):
        grid = Scripted({f"train-{node}": 1 for node in (1, 2)})
        streamed = IncrementalGrid(grid, listener=availability)
        asked = sorted(availability.due([1, 2, 3]))
        availability.passed_over({1, 2, 3}.difference(asked))
        replies = streamed.send_and_receive([message(n) for n in asked], timeout=long)
        assert answers(replies) == ["train-1", "train-2"], number
        looks.append(grid.looks)
    # The first round waits for its limit, the second for what rounds were seen to take, the others for nobody.
    assert looks[0] > looks[2] == looks[3] == looks[4] == looks[5] == 1
    assert not availability.awaits(3)


def test_an_answer_that_comes_late_brings_a_node_back_though_it_is_not_merged() -> None:
    availability = ClientAvailability(least=0.05)
    for _ in range(3):
        availability.missed(3)
    grid = Scripted({"train-1": 1, "train-3": 2, "train-4": 3})
    streamed = IncrementalGrid(grid, listener=availability)
    assert answers(streamed.send_and_receive([message(1), message(3)])) == ["train-1"]
    assert not availability.awaits(3)
    assert answers(streamed.send_and_receive([message(4)])) == ["train-4"]
    assert availability.awaits(3)


def test_what_the_superlink_answers_is_booked_under_the_node_that_was_asked() -> None:
    class Failing(Scripted):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            found = []
            for each in message_ids:
                sent = self._sent.pop(each, None)
                if sent is not None:
                    reply = Message(Error(code=3, reason="node is gone"), reply_to=sent)
                    reply.metadata.__dict__["_src_node_id"] = 1
                    found.append(reply)
            return found

    availability = ClientAvailability()
    streamed = IncrementalGrid(Failing({}), listener=availability)
    replies = list(streamed.send_and_receive([message(7), message(9)]))
    assert [reply.metadata.src_node_id for reply in replies] == [7, 9]
    # Nor is it a sign of the node.
    assert availability.patience([7, 9]) is None


class Wrapper(Strategy):
    """Passes everything on, as Flower's wrappers do."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy

    def configure_train(self, *arguments: Any, **options: Any) -> Any:
        return self.strategy.configure_train(*arguments, **options)

    def aggregate_train(self, *arguments: Any, **options: Any) -> Any:
        return self.strategy.aggregate_train(*arguments, **options)

    def configure_evaluate(self, *arguments: Any, **options: Any) -> Any:
        return self.strategy.configure_evaluate(*arguments, **options)

    def aggregate_evaluate(self, *arguments: Any, **options: Any) -> Any:
        return self.strategy.aggregate_evaluate(*arguments, **options)

    def summary(self) -> None:
        self.strategy.summary()


def test_a_wrapper_gets_the_patience_of_what_it_wraps() -> None:
    terms = RoundConfig(deadline=Deadline(seconds=7.0))
    inner = PartialUpdates(quiet(), config=terms, merge=LATE)
    with incremental(Scripted({}), Wrapper(Wrapper(inner))) as grid:
        assert isinstance(grid, IncrementalGrid)
        assert grid._late and grid._patience == inner.patience
        assert grid._listener is inner.availability


@pytest.mark.parametrize("around", [True, False])
def test_a_wrapper_that_waits_for_all_is_said(
    around: bool, caplog: pytest.LogCaptureFixture
) -> None:
    terms = RoundConfig(deadline=Deadline(seconds=60.0))
    inner = PartialUpdates(quiet(), config=terms)
    apps = {node: scripted_app(manifest(), scripts()[node]) for node in EXAMPLES}
    grid = InProcessGrid(len(apps), apps.__getitem__)
    strategy = Wrapper(inner) if around else inner
    strategy.start(grid, first_arrays(), num_rounds=2)
    said = [each for each in caplog.records if "wrapped around" in each.getMessage()]
    assert len(said) == around
