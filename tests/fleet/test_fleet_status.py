"""What is known of each node, from the inventory, the server and the journal of rounds."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from fl_elastic.fleet.flower_cli import NodeState
from fl_elastic.fleet.inventory import Inventory, Node, Server
from fl_elastic.fleet.status import NodeRound, NodeStatus, fleet_status, last_rounds
from fl_elastic.monitoring.journal import Journal

FLEET = Inventory(
    Server(("server.lan",), 8000),
    (
        Node("pi0", node_id="10"),
        Node("pi1", node_id="11"),
        Node("pi2"),
        Node("pi3", revoked=True),
        Node("pi4", node_id="99"),
    ),
)
STATES = [
    NodeState("10", "online", "since", "before"),
    NodeState("11", "offline", "since", "then"),
    NodeState("77", "registered"),
    NodeState("78", "unregistered"),
]


def test_every_node_has_one_line() -> None:
    rounds = {"10": NodeRound(4), "pi1": NodeRound(3)}
    assert fleet_status(FLEET, STATES, rounds) == [
        NodeStatus("pi0", "10", "online", "since", NodeRound(4)),
        NodeStatus("pi1", "11", "offline", "then", NodeRound(3)),
        NodeStatus("pi2", None, "unregistered"),
        NodeStatus("pi3", None, "revoked"),
        NodeStatus("pi4", "99", "unregistered"),
        NodeStatus("77", "77", "registered"),
    ]


def test_a_server_that_does_not_answer_leaves_the_rest() -> None:
    found = fleet_status(FLEET, None, {"pi0": NodeRound(4)})
    assert [each.state for each in found] == ["unknown"] * 3 + ["revoked", "unknown"]
    assert found[0].last == NodeRound(4)


def test_the_last_round_of_each_node_counts() -> None:
    pi0 = {
        "step_seconds": 0.5,
        "temperature_celsius": 60.5,
        "coverage": 0.75,
        "disk_free_bytes": 10,
    }
    rounds = [
        {"round": 1, "time": 5.5, "nodes": {"pi0": {}, "pi1": {"step_seconds": 1}}},
        {"round": 2, "time": "later", "nodes": {"pi0": pi0}},
    ]
    assert last_rounds(rounds) == {
        "pi0": NodeRound(2, "later", 0.5, 60.5, 0.75, 10.0),
        "pi1": NodeRound(1, "5.5", 1.0),
    }
    assert (
        last_rounds([{"round": 1, "nodes": {"pi0": {"temperature": 50}}}])["pi0"].temperature == 50
    )


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    assert Journal(path).entries() == []
    path.write_bytes(b'{"round": 1}\n[1]\n{"round": 2, "no\n\xff\n\n{"round": 3}\n{"ro')
    assert [entry["round"] for entry in Journal(path).entries()] == [1, 3]


def test_the_file_before_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "rounds.jsonl.1").write_text('{"round": 1, "nodes": {"pi0": {}}}\n')
    (tmp_path / "rounds.jsonl").write_text('{"round": 2, "nodes": {"pi1": {}}}\n')
    found = last_rounds(Journal(tmp_path / "rounds.jsonl").entries())
    assert (found["pi0"].round, found["pi1"].round) == (1, 2)


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    st.lists(
        st.fixed_dictionaries({"round": json_values, "time": json_values, "nodes": json_values})
    )
)
def test_no_journal_is_too_strange(rounds: list[dict[str, object]]) -> None:
    for found in last_rounds(rounds).values():
        assert isinstance(found.round, int)
