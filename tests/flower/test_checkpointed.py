"""A run that was interrupted goes on as if it had not been."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedAvgM,
    Result,
    Strategy,
)
from scripted_clients import EXAMPLES, first_arrays, manifest, scripts
from small_federation import SERVERS as FLOWERS
from small_federation import (
    Around,
    Completed,
    as_record,
    as_weights,
    assert_identical,
    quiet,
    run,
    scripted_app,
    silent_app,
)

from fl_elastic.aggregation import SERVER_OPTIMIZERS, ModelAverage
from fl_elastic.errors import CheckpointError
from fl_elastic.flower import Checkpointed, PartialUpdates, load_checkpoint
from fl_elastic.state.archive import Kind, write_archive

SERVERS: dict[str, Callable[[], Strategy]] = {
    **FLOWERS,
    "clipped": lambda: DifferentialPrivacyServerSideFixedClipping(
        quiet(FedAvgM, server_momentum=0.9), 0.0, 0.3, 4
    ),
    "adaptive": lambda: DifferentialPrivacyServerSideAdaptiveClipping(
        quiet(), 0.0, 4, initial_clipping_norm=0.3
    ),
}


class Interrupted(Exception):
    """Stands for a crash of the server's process."""


def trained(strategy: Strategy, rounds: int, **options: Any) -> Result:
    apps = {node: scripted_app(manifest(), update) for node, update in scripts().items()}
    return run(strategy, apps, first_arrays(), rounds, **options)[0]


def checkpointed(directory: Path, server: str = "fedavg", **options: Any) -> Checkpointed:
    return Checkpointed(PartialUpdates(SERVERS[server]()), directory, **options)


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize(
    ("server", "interrupted_after"),
    [*((server, 2) for server in SERVERS), ("fedadam", 1), ("adaptive", 4)],
)
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(
    server: str, interrupted_after: int, tmp_path: Path
) -> None:
    whole = trained(PartialUpdates(SERVERS[server]()), 5)

    def crash(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if server_round == interrupted_after:
            raise Interrupted
        return None

    with pytest.raises(Interrupted):
        trained(checkpointed(tmp_path, server), 5, evaluate_fn=crash)
    resumed = trained(checkpointed(tmp_path, server), 5)
    assert_identical(resumed.arrays, whole.arrays)


class Halving(FedAvgM):
    """Changes settings from round to round in each of the places where users do that."""

    in_attribute = 1.0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._privately, self.waited, self.last = 1, False, None
        self.seed, self.phase = 2**2000, np.complex64(1j)
        self.seen: list[dict[str, Any]] = []

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        # As Flower's documents have it.
        config["lr"] = 0.5 * float(config["lr"])  # type: ignore[arg-type]
        self.in_attribute *= 0.5
        self._privately += 2
        self.last = self.in_attribute if self.last is None else self.last + 1
        self.server_momentum = self.in_attribute
        config["said"] = [self.in_attribute, float(self._privately), float(self.waited), self.last]
        self.waited = True
        self.seen.append(dict(config))
        return super().configure_train(server_round, arrays, config, grid)


class Privately(Around):
    """A wrapper that keeps what it wraps under a private name."""

    def __init__(self, base: Strategy) -> None:
        self._within = base

    @property
    def base(self) -> Strategy:  # type: ignore[override]
        return self._within


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", [lambda each: each, Around, Privately])
def test_a_schedule_in_a_strategy_goes_on_where_it_was(
    wrapper: Callable[..., Strategy], tmp_path: Path
) -> None:
    def ran(rounds: int, folder: Path | None = None) -> tuple[Halving, Result]:
        inner = quiet(Halving, server_momentum=0.5)
        strategy: Strategy = PartialUpdates(wrapper(inner))
        strategy = strategy if folder is None else Checkpointed(strategy, folder)
        given = ConfigRecord({"lr": 0.1, "name": "x"})
        result = trained(strategy, rounds, train_config=given)
        assert dict(given) == {"lr": 0.1, "name": "x"}
        return inner, result

    whole, expected = ran(5)
    assert [each["lr"] for each in whole.seen] == [0.1 / 2**k for k in range(1, 6)]
    for last in range(1, 5):
        folder = tmp_path / str(last)
        ran(last, folder)
        resumed, result = ran(5, folder)
        assert resumed.seen == whole.seen
        assert_identical(result.arrays, expected.arrays)


def test_a_setting_that_the_owner_changed_is_not_overwritten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def ran(rate: float, momentum: float, rounds: int) -> Halving:
        inner = quiet(Halving, server_momentum=momentum)
        strategy = Checkpointed(PartialUpdates(inner), tmp_path)
        trained(strategy, rounds, train_config=ConfigRecord({"lr": rate}))
        return inner

    ran(0.1, 0.5, 2)
    again = ran(0.8, 0.25, 3)
    assert [each["lr"] for each in again.seen[2:]] == [0.4]
    assert "setting 'lr' is 0.8, but was 0.1" in caplog.text
    assert "inner.server_momentum is 0.25, but was 0.5" in caplog.text


@pytest.mark.parametrize("name", SERVER_OPTIMIZERS.names())
def test_a_server_optimiser_goes_on_with_its_moments_of_every_tensor(
    name: str, tmp_path: Path
) -> None:
    def strategy() -> PartialUpdates:
        optimizer, average = SERVER_OPTIMIZERS.make(name), ModelAverage(0.5)
        return PartialUpdates(quiet(), server_optimizer=optimizer, average=average)

    trained(Checkpointed(strategy(), tmp_path), 2)
    resumed = trained(Checkpointed(strategy(), tmp_path), 4)
    assert_identical(resumed.arrays, trained(strategy(), 4).arrays)


def test_a_server_optimiser_that_a_preset_has_taken_away_is_no_state(tmp_path: Path) -> None:
    """The preset chooses it before it has seen the model."""

    def strategy() -> Checkpointed:
        inner = PartialUpdates(quiet(), server_optimizer=SERVER_OPTIMIZERS.make("adam"))
        kept = Checkpointed(inner, tmp_path)
        inner.server_optimizer = None
        return kept

    trained(strategy(), 1)
    resumed = trained(strategy(), 3)
    assert_identical(resumed.arrays, trained(PartialUpdates(quiet()), 3).arrays)


def test_state_of_tensors_without_dimensions_is_kept_too(tmp_path: Path) -> None:
    """Flower's FedAdam holds bare numbers for them."""

    def part(rounds: int, directory: Path) -> dict[str, np.ndarray]:
        inner = Completed(quiet(FedAdam, eta=0.05, tau=0.01), scripts(), "contributors")
        apps = {node: silent_app() for node in EXAMPLES}
        arrays = run(Checkpointed(inner, directory), apps, first_arrays(), rounds)[0].arrays
        return as_weights(arrays)

    part(2, tmp_path / "parts")
    resumed, whole = part(4, tmp_path / "parts"), part(4, tmp_path / "whole")
    for name, array in whole.items():
        # Without this wrapper the order of replies reaches the last digit.
        np.testing.assert_allclose(resumed[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("kind", [FedAvg, FedAvgM, FedAdam])
def test_flowers_own_strategies_resume_with_counters_that_they_have_averaged(
    kind: type[FedAvg], tmp_path: Path
) -> None:
    """FedAvg makes a float of the number of batches that a norm has counted."""
    begun = ArrayRecord({"w": Array(np.ones(2, np.float32)), "count": Array(np.array(3))})
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        before = message.content["arrays"].items()
        arrays = {name: Array(np.asarray(each.numpy() + 1)) for name, each in before}
        metrics = MetricRecord({"num-examples": 1})
        content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics})
        return Message(content, reply_to=message)

    def part(rounds: int, folder: Path) -> ArrayRecord:
        return run(Checkpointed(quiet(kind, nodes=2), folder), {1: app, 2: app}, begun, rounds)[
            0
        ].arrays

    part(2, tmp_path / "parts")
    resumed, whole = part(4, tmp_path / "parts"), part(4, tmp_path / "whole")
    assert_identical(resumed, whole)
    assert whole["count"].numpy() > 3


def test_every_round_is_written_and_the_newest_are_kept(tmp_path: Path) -> None:
    directory = tmp_path / "made" / "if missing"
    seen: list[list[str]] = []

    def look(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if server_round:
            seen.append(files(directory))
            stored = load_checkpoint(directory, arrays)
            assert stored is not None
            assert stored.server_round == server_round
            assert_identical(as_record(stored.arrays), arrays)
        return None

    trained(checkpointed(directory), 4, evaluate_fn=look)
    names = [f"round-{number:06d}.state" for number in range(1, 5)]
    assert seen == [names[:1], names[:2], names[1:3], names[2:4]]


def test_the_newest_checkpoint_holds_the_model_that_was_tested(tmp_path: Path) -> None:
    differ: list[bool] = []

    def look(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if server_round:
            stored = load_checkpoint(tmp_path, arrays)
            assert stored is not None
            assert_identical(as_record(stored.tested), arrays)
            went_on = as_weights(arrays)
            differ.append(
                any(not np.array_equal(went_on[n], each) for n, each in stored.arrays.items())
            )
        return None

    strategy = PartialUpdates(quiet(), average=ModelAverage(0.5))
    result = trained(Checkpointed(strategy, tmp_path), 3, evaluate_fn=look)
    stored = load_checkpoint(tmp_path, result.arrays)
    assert stored is not None and any(differ)
    assert_identical(as_record(stored.tested), result.arrays)


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "round-notes.state").write_text("mine")
    (tmp_path / ".round-000009.state.77.tmp").write_text("half a file of a crash")
    trained(checkpointed(tmp_path), 2)
    resumed = trained(checkpointed(tmp_path), 3)
    assert resumed.arrays
    assert (tmp_path / "round-notes.state").read_text() == "mine"
    assert "round-000003.state" in files(tmp_path)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 0xFF
    path.write_bytes(bytes(data))


def later_version(path: Path) -> None:
    write_archive(path, Kind("fl_elastic.checkpoint", 99), {})


def other_kind(path: Path) -> None:
    write_archive(path, Kind("fl_elastic.stream"), {})


def no_facts(path: Path) -> None:
    write_archive(path, Kind("fl_elastic.checkpoint"), {})


def empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES = [
    truncate, flip, later_version, other_kind, no_facts, empty,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_costs_one_round(damage: Callable[[Path], None], tmp_path: Path) -> None:
    whole = trained(PartialUpdates(SERVERS["fedadam"]()), 4)
    trained(checkpointed(tmp_path, "fedadam"), 3)
    damage(tmp_path / "round-000003.state")
    rounds: list[int] = []
    resumed = trained(
        checkpointed(tmp_path, "fedadam"), 4, evaluate_fn=lambda number, _: rounds.append(number)
    )
    assert rounds == [2, 3, 4]
    assert_identical(resumed.arrays, whole.arrays)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_only_are_an_error(damage: Callable[[Path], None], tmp_path: Path) -> None:
    trained(checkpointed(tmp_path), 2)
    for path in tmp_path.iterdir():
        damage(path)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be read") as refused:
        trained(checkpointed(tmp_path), 3)
    assert "round-000002.state" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(files(tmp_path)) == 2


@pytest.mark.parametrize(
    "other",
    [
        {"w": np.zeros(3, np.float32)},
        as_weights(first_arrays()) | {"scale": np.zeros(2, np.float32)},
        as_weights(first_arrays()) | {"more": np.zeros(2, np.float32)},
    ],
    ids=["other names", "another shape", "one more"],
)
def test_the_checkpoint_of_another_model_is_refused(
    other: dict[str, np.ndarray], tmp_path: Path
) -> None:
    trained(checkpointed(tmp_path), 1)
    with pytest.raises(CheckpointError, match="holds another model") as refused:
        checkpointed(tmp_path).start(_no_grid(), as_record(other), num_rounds=1)
    assert "\n" not in str(refused.value)


def _no_grid() -> Any:
    return None


@pytest.mark.parametrize(
    ("before", "server"),
    [("clipped", "fedavg"), ("clipped", "fedavgm"), ("fedavgm", "fedavg"), ("fedadam", "fedavgm")],
)
def test_the_checkpoint_of_another_strategy_is_refused(
    before: str, server: str, tmp_path: Path
) -> None:
    trained(checkpointed(tmp_path, before), 1)
    with pytest.raises(CheckpointError, match="another strategy") as refused:
        trained(checkpointed(tmp_path, server), 2)
    assert "\n" not in str(refused.value)


def test_without_resume_it_starts_afresh(tmp_path: Path) -> None:
    trained(checkpointed(tmp_path, "fedavgm"), 5)
    rounds: list[int] = []
    fresh = trained(
        checkpointed(tmp_path, "fedavgm", resume=False),
        2,
        evaluate_fn=lambda number, _: rounds.append(number),
    )
    assert rounds == [0, 1, 2]
    assert_identical(fresh.arrays, trained(PartialUpdates(SERVERS["fedavgm"]()), 2).arrays)
    # What is resumed next is the new run, not the longer one before it.
    assert files(tmp_path) == ["round-000001.state", "round-000002.state"]
    resumed = trained(checkpointed(tmp_path, "fedavgm"), 3)
    assert_identical(resumed.arrays, trained(PartialUpdates(SERVERS["fedavgm"]()), 3).arrays)


def test_rounds_count_from_the_start_of_the_whole_run(tmp_path: Path) -> None:
    configured: list[int] = []
    seen: list[int] = []

    class Watched(FedAvg):
        def configure_train(self, server_round: int, *arguments: Any, **options: Any) -> Any:
            configured.append(server_round)
            return super().configure_train(server_round, *arguments, **options)

    def strategy() -> Checkpointed:
        return Checkpointed(PartialUpdates(Watched(min_available_nodes=4)), tmp_path)

    trained(strategy(), 2)
    configured.clear()
    result = trained(
        strategy(), 4,
        evaluate_fn=lambda number, _: seen.append(number) or MetricRecord({"n": number}),
    )  # fmt: skip
    assert configured == [3, 4]
    assert seen == [2, 3, 4]
    assert sorted(result.train_metrics_clientapp) == [3, 4]
    assert sorted(result.evaluate_metrics_clientapp) == [3, 4]
    assert {n: dict(r) for n, r in result.evaluate_metrics_serverapp.items()} == {
        number: {"n": number} for number in (2, 3, 4)
    }


def test_a_run_that_begins_from_the_weights_of_an_earlier_one_says_so_aloud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(checkpointed(tmp_path), 2)
    assert not [each for each in caplog.records if "resuming" in each.getMessage()]
    trained(checkpointed(tmp_path), 3)
    (said,) = [each for each in caplog.records if "resuming" in each.getMessage()]
    assert said.levelname == "WARNING"
    assert said.getMessage().startswith(f"resuming after round 2 from {tmp_path}: these weights")
    caplog.clear()
    trained(checkpointed(tmp_path, resume=False), 1)
    assert not [each for each in caplog.records if "resuming" in each.getMessage()]


def test_a_round_without_a_usable_reply_writes_nothing(tmp_path: Path) -> None:
    def without_content(reply: Any) -> Any:
        for name in tuple(reply.content):
            del reply.content[name]
        return reply

    trained(checkpointed(tmp_path), 2, alter=without_content)
    assert files(tmp_path) == []


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_directory_that_cannot_be_written_is_one_line(below: str, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot write checkpoint") as refused:
        trained(checkpointed(blocked / below), 1)
    assert "\n" not in str(refused.value)
    assert blocked.read_text() == "in the way"
