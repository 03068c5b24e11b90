"""The book-keeping of one method with one seed."""

from __future__ import annotations

import json

import pytest

from fl_elastic.errors import ScenarioError
from fl_elastic.groups import TensorGroup
from fl_elastic.groups.graph import GroupKind
from fl_elastic_simulations.engine.run_result import ClientRound, MeasuredSteps, RunResult
from fl_elastic_simulations.unequal.devices import Device
from fl_elastic_simulations.unequal.fleet import Client

SLOW = Device("slow", "Slow", 10.0, 1e6, 2e6)
FAST = Device("fast", "Fast", 1.0, 1e7, 2e7)
CLIENTS = (Client(0, SLOW, 4.0), Client(1, SLOW, 4.0), Client(2, FAST, 1.0))
GROUPS = (
    TensorGroup("head", ("head.weight", "head.bias"), ((2, 4), (2,)), GroupKind.OTHER),
    TensorGroup("stem", ("stem.weight",), ((4, 3),), GroupKind.OTHER),
)
HEAD = frozenset({"head.weight", "head.bias"})
EVERYTHING = HEAD | {"stem.weight", "norm.running_mean"}


def done(client: int, **changes: object) -> ClientRound:
    fields: dict[str, object] = {
        "tensors": EVERYTHING, "host_seconds": 2.0, "step_seconds": 0.1, "steps": 10,
        "requested_steps": 10, "uplink_bytes": 1_000_000, "downlink_bytes": 4_000_000,
    }  # fmt: skip
    return ClientRound(client=client, **(fields | changes))  # type: ignore[arg-type]


def trained(*rounds: ClientRound, rejected: int = 0) -> RunResult:
    cell = RunResult("elastic", 3)
    cell.evaluated(len(cell.history), 0.1, 2.3)
    cell.spend(rounds, CLIENTS, 4_000_000 * rejected, rejected)
    cell.cover(rounds, CLIENTS, GROUPS)
    cell.evaluated(len(cell.history), 0.5, 1.1)
    return cell


def test_a_round_takes_as_long_as_its_slowest_client() -> None:
    cell = trained(done(0, host_seconds=1.0), done(2, host_seconds=2.0))
    # The slow device: 1 s times 10, 1 MB up at 1 MB/s, 4 MB down at 2 MB/s.
    assert cell.rows()[1]["simulated_seconds"] == pytest.approx(10 + 1 + 2)
    assert cell.rows()[1]["uplink_bytes"] == 2_000_000
    assert cell.rows()[1]["downlink_bytes"] == 8_000_000
    assert cell.rows()[0]["simulated_seconds"] == 0


def test_each_client_pays_for_what_it_was_sent() -> None:
    cell = trained(done(0, host_seconds=1.0, downlink_bytes=1_000_000), done(2))
    assert cell.rows()[1]["simulated_seconds"] == pytest.approx(10 + 1 + 0.5)
    assert cell.rows()[1]["downlink_bytes"] == 5_000_000


def test_rejected_clients_got_the_model_and_are_counted() -> None:
    cell = trained(done(2), rejected=2)
    assert (cell.accepted, cell.rejected) == (1, 2)
    assert cell.rows()[1]["downlink_bytes"] == 12_000_000
    assert cell.rows()[1]["uplink_bytes"] == 1_000_000


def test_a_round_of_rejected_clients_only_is_free_but_counted() -> None:
    cell = trained(rejected=3)
    assert cell.rejected == 3
    assert cell.rows()[1]["simulated_seconds"] == 0
    assert cell.coverage == {"slow": [[0.0, 0.0]], "fast": [[0.0, 0.0]]}
    assert cell.steps == []


def test_coverage_is_the_share_of_each_kind_of_device() -> None:
    cell = trained(done(0, tensors=HEAD), done(1), done(2, tensors=frozenset({"head.bias"})))
    assert cell.coverage == {"slow": [[1.0, 0.5]], "fast": [[1.0, 0.0]]}


def test_steps_remember_whether_everything_was_trained() -> None:
    cell = trained(done(0, tensors=HEAD, steps=4, step_seconds=0.05), done(2))
    assert cell.steps == [
        MeasuredSteps("slow", 0.05, 0.4, False),
        MeasuredSteps("fast", 0.1, 1.0, True),
    ]


def test_a_client_without_a_whole_batch_gives_no_step_time() -> None:
    assert trained(done(2, step_seconds=0.0)).steps == []


def test_what_is_written_can_be_read() -> None:
    cell = trained(done(0, tensors=HEAD), done(2), rejected=1)
    cell.scenario = "0123456789abcdef"
    cell.cut_is("stem")
    again = RunResult.from_json(cell.to_json())
    assert again == cell
    again.spend([done(2)], CLIENTS, 0, 0)
    again.evaluated(2, 0.7, 0.9)
    assert again.rows()[2]["uplink_bytes"] == 3_000_000


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "3",
        "{}",
        json.dumps({"method": "full"}),
        json.dumps({"method": "full", "seed": 0, "steps": [], "extra": 1}),
        json.dumps({"method": "full", "seed": 0, "steps": [["slow", 0.1, True]]}),
        json.dumps({"method": "full", "seed": 0, "steps": [{"device": "slow"}]}),
        json.dumps({"method": "full", "seed": 0, "steps": 3}),
    ],
)
def test_something_else_is_refused_with_one_line(text: str) -> None:
    with pytest.raises(ScenarioError, match="cannot be read") as refused:
        RunResult.from_json(text)
    assert "\n" not in str(refused.value)
    assert "delete it" in str(refused.value)


def test_it_knows_since_when_the_cut_lies_where_and_what_features_were_kept() -> None:
    cell = trained(done(0, features_found=3, features_computed=5), done(2, features_found=4))
    first = cell.simulated_seconds
    for group in ("", "stem", "stem", "head"):
        cell.cut_is(group)
        cell.spend([done(2)], CLIENTS, 0, 0)
    # A round of the fast device.
    each = 2.0 + 0.1 + 0.2
    assert [group for _, group in cell.cuts] == ["stem", "head"]
    assert [since for since, _ in cell.cuts] == pytest.approx([first + each, first + 3 * each])
    assert (cell.features_found, cell.features_computed) == (7, 5)
    cell.evaluated(1, 0.5, 1.0)
    assert (cell.history[-1]["features_found"], cell.history[-1]["features_computed"]) == (7, 5)


def test_it_knows_why_updates_were_left_out_and_when() -> None:
    cell = trained(done(2), rejected=3)
    cell.left_out(
        1, ["past the deadline: 3.2 s, the round 1 s", "past the deadline: 12 s, the round 1e-3 s"]
    )
    cell.left_out(3, ["past the deadline: 5 s, the round 1 s", "conv1 sent as fp32 is odd"])
    late = "past the deadline: … s, the round … s"
    assert cell.rejections == {late: {"1": 2, "3": 1}, "conv1 sent as fp32 is odd": {"3": 1}}
    assert RunResult.from_json(cell.to_json()) == cell


def test_it_keeps_the_most_that_a_step_took_on_each_kind_of_device() -> None:
    cell = trained(done(0, peak_bytes=3e6), done(1, peak_bytes=5e6), done(2))
    cell.spend([done(0, peak_bytes=4e6)], CLIENTS, 0, 0)
    assert cell.peaks == {"slow": 5e6}
