"""A server that dies at any message of a run goes on to the same model, ledger and moments, bit for bit."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Result
from in_process_grid import InProcessGrid
from scripted_clients import EXAMPLES, first_arrays, manifest, scripts
from slow_ones import slow_unless
from small_federation import Weights, assert_identical, quiet

from fl_elastic.aggregation import SERVER_OPTIMIZERS
from fl_elastic.errors import CheckpointError, StaleModelError
from fl_elastic.flower import Checkpointed, Deadline, PartialUpdates, RoundConfig, load_checkpoint
from fl_elastic.flower.capabilities import Capabilities, GroupCosts
from fl_elastic.flower.records import (
    ERROR,
    HAVE,
    IMPORTANCE,
    STALE,
    evaluate_reply,
    read_instruction,
    train_reply,
)
from fl_elastic.flower.tasks.task import TASK, RoundTask, config_key, task_in
from fl_elastic.flower.tasks.train import Train
from fl_elastic.update import PartialUpdate, encode
from fl_elastic.update.model_wire import decode_weights

KEEP = config_key("keep")
ROUNDS = 3
RICH = RoundConfig(deadline=Deadline(quantile=0.5), delta_downlink=True, plan="server")


def optimized(name: str) -> PartialUpdates:
    return PartialUpdates(
        quiet(fraction_evaluate=1.0), server_optimizer=SERVER_OPTIMIZERS.make(name)
    )


STRATEGIES: dict[str, Callable[[], PartialUpdates]] = {
    "fedavg": lambda: PartialUpdates(quiet(fraction_evaluate=1.0)),
    "lazy adam": lambda: optimized("adam"),
    "all terms": lambda: PartialUpdates(
        quiet(fraction_evaluate=1.0),
        rule="inverse_probability",
        config=RICH,
        server_optimizer=SERVER_OPTIMIZERS.make("momentum"),
    ),
    "server's plan": lambda: PartialUpdates(
        quiet(fraction_evaluate=1.0), config=RoundConfig(plan="server")
    ),
}
COSTS = GroupCosts(("head", "stem"), (1.0, 1.0), (0.0, 1.0), (8.0, 8.0), 1.0, 0)


class Crash(Exception):
    """Stands for the end of the server's process."""


class Crashing(InProcessGrid):
    """Ends the server when it has sent so many messages, or looked for replies so many times."""

    def __init__(self, apps: dict[int, ClientApp], messages: int, looks: int) -> None:
        super().__init__(len(apps), apps.__getitem__)
        self._messages, self._looks = messages, looks

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        # Flower draws clients in an order of its own; sums are the same in the same order.
        return super().push_messages(sorted(messages, key=lambda m: m.metadata.dst_node_id))

    def _answer(self, message: Message) -> Message:
        if len(self.sent) > self._messages:
            raise Crash
        return super()._answer(message)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self._looks -= 1
        if self._looks < 0:
            raise Crash
        # One at a time, so that there is a place to crash between any two.
        return super().pull_messages(list(message_ids)[:1])


def obedient_app(node: int, kept: dict[int, tuple[Weights, int]]) -> ClientApp:
    """Does what it is told in every respect, and depends on nothing else."""
    app, update_of = ClientApp(), scripts()[node]

    def received(arrays: list[np.ndarray], told: RoundTask) -> tuple[Weights, int]:
        weights, version = decode_weights(arrays[0].tobytes(), manifest(), kept.get(node))
        if told.keep:
            kept[node] = weights, version
        return weights, version

    @app.train()
    def train(message: Message, _: object) -> Message:
        arrays, config = read_instruction("train", message.content)
        told = Train.from_config(config)
        try:
            weights, version = received(arrays, told)
        except StaleModelError as error:
            return Message(train_reply([], 0, {ERROR: str(error), STALE: True}), reply_to=message)
        update = update_of(weights, version)
        # Whatever the server says leaves its mark on the update.
        said = json.dumps([told.deadline, told.groups, told.rate])
        factor = np.float32(1 + sum(said.encode()) % 97 / 1000)
        deltas = {name: delta * factor for name, delta in update.deltas.items()}
        update = PartialUpdate(deltas, update.steps, update.num_examples, version)
        metrics = {"train-loss": 1.0, HAVE: version} if told.keep else {"train-loss": 1.0}
        if told.groups:
            metrics[IMPORTANCE] = json.dumps({"stem": node, "head": version + 1})  # type: ignore[assignment]
        packed = np.frombuffer(encode(update, manifest()), np.uint8)
        return Message(train_reply([packed], EXAMPLES[node], metrics), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, _: object) -> Message:
        arrays, config = read_instruction("evaluate", message.content)
        if config.get(TASK) == "describe":
            mine = Capabilities(
                f"class {node % 2}", EXAMPLES[node], 10, float(node), 100.0,
                allowed_step_seconds=2.5, groups=COSTS,
            )  # fmt: skip
            return Message(evaluate_reply(0.0, 1, mine.to_metrics()), reply_to=message)
        try:
            weights, version = received(arrays, task_in(config, "evaluate"))
        except StaleModelError as error:
            return Message(evaluate_reply(0, 0, {ERROR: str(error), STALE: True}), reply_to=message)
        loss = float(np.abs(weights["head.weight"]).sum())
        metrics = {HAVE: version} if config.get(KEEP) else {}
        return Message(evaluate_reply(loss, EXAMPLES[node], metrics), reply_to=message)

    return app


def life(
    strategy: PartialUpdates, directory: Path, kept: dict[int, tuple[Weights, int]],
    messages: int = 10**9, looks: int = 10**9,
) -> tuple[Result, Crashing]:  # fmt: skip
    """One life of the server's process; clients live on."""
    apps = {node: obedient_app(node, kept) for node in EXAMPLES}
    grid = Crashing(apps, messages, looks)
    result = Checkpointed(strategy, directory).start(grid, first_arrays(), num_rounds=ROUNDS)
    return result, grid


def memory(directory: Path) -> dict[str, np.ndarray]:
    """What the last checkpoint says, other than which versions clients hold: a crash may have told them more."""
    found = load_checkpoint(directory, first_arrays())
    assert found is not None
    assert found.server_round == ROUNDS
    facts = copy.deepcopy(dict(found.state.facts))
    facts["downlink"]["held"] = None
    return {**found.state.arrays, "facts": np.frombuffer(json.dumps(facts).encode(), np.uint8)}


def assert_same_memory(one: Path, other: Path) -> None:
    first, second = memory(one), memory(other)
    assert first.keys() == second.keys()
    for name, array in first.items():
        assert array.tobytes() == second[name].tobytes(), name


def crashed_and_resumed(name: str, whole: Result, folder: Path, **point: int) -> None:
    """A server that dies at this point and is started again ends as the one that does not."""
    make, kept = STRATEGIES[name], dict[int, tuple[Weights, int]]()
    directory = folder / str(point)
    with pytest.raises(Crash):
        life(make(), directory, kept, **point)
    resumed, _ = life(make(), directory, kept)
    assert_identical(resumed.arrays or first_arrays(), whole.arrays)
    assert_same_memory(directory, folder / "whole")


@pytest.mark.parametrize(
    ("name", "every"),
    [("all terms", 3), *slow_unless(lambda *_: False, [(name, 1) for name in STRATEGIES])],
)
def test_a_crash_at_any_message_changes_nothing(name: str, every: int, tmp_path: Path) -> None:
    whole, grid = life(STRATEGIES[name](), tmp_path / "whole", {})
    total = len(grid.sent)
    assert total == ROUNDS * 8 + (4 if name in ("all terms", "server's plan") else 0)
    for point in range(0, total, every):
        crashed_and_resumed(name, whole, tmp_path, messages=point)


@pytest.mark.parametrize("name", slow_unless("lazy adam".__eq__, ["lazy adam", "all terms"]))
def test_a_crash_at_any_reply_changes_nothing(name: str, tmp_path: Path) -> None:
    whole, _ = life(STRATEGIES[name](), tmp_path / "whole", {})
    for point in range(0, ROUNDS * 8, 3):
        crashed_and_resumed(name, whole, tmp_path, looks=point)


@pytest.mark.parametrize("seed", range(2))
def test_many_crashes_in_a_row_change_nothing(seed: int, tmp_path: Path) -> None:
    make = STRATEGIES["all terms"]
    whole, _ = life(make(), tmp_path / "whole", {})
    draw, kept = np.random.default_rng(seed), dict[int, tuple[Weights, int]]()
    resumed = None
    for _ in range(100):
        try:
            resumed, _ = life(make(), tmp_path / "parts", kept, messages=int(draw.integers(4, 20)))
            break
        except Crash:
            continue
    assert resumed is not None
    assert_identical(resumed.arrays, whole.arrays)
    assert_same_memory(tmp_path / "parts", tmp_path / "whole")


def test_the_ledger_counts_on_after_a_restart(tmp_path: Path) -> None:
    make = STRATEGIES["all terms"]
    with pytest.raises(Crash):
        life(make(), tmp_path, {}, messages=4 + 2 * 8)
    strategy = make()
    life(strategy, tmp_path, {})
    ledger = strategy.fleet.ledger
    assert ledger is not None
    assert {entry.rounds for entry in ledger.clients.values()} == {ROUNDS}
    assert ledger.clients["2"].trained.tolist() == [0, 0, 0, 3, 0]
    assert {entry.device for entry in ledger.clients.values()} == {"class 0", "class 1"}


@pytest.mark.parametrize(("before", "after"), [("adam", None), (None, "adam"), ("adam", "yogi")])
def test_moments_of_another_server_optimizer_are_refused(
    before: str | None, after: str | None, tmp_path: Path
) -> None:
    def made(name: str | None) -> PartialUpdates:
        return STRATEGIES["fedavg"]() if name is None else optimized(name)

    life(made(before), tmp_path, {})
    with pytest.raises(CheckpointError, match="another strategy"):
        life(made(after), tmp_path, {})
