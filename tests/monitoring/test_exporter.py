"""Metrics as Prometheus reads them, over real HTTP."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_elastic.errors import FleetError
from fl_elastic.monitoring import Journal
from fl_elastic.monitoring.exporter import journal_metrics, serve_metrics

ENTRY: dict[str, Any] = {
    "round": 3,
    "time": 100.0,
    "accuracy": 0.5,
    "deadline_seconds": None,
    "uplink_bytes_total": 1000,
    "nodes": {'p"i\n0': {"step_seconds": 0.25, "coverage": None}, "pi1": {"step_seconds": 0.5}},
    "rejections": [{"node": "pi2", "reason": "late"}],
}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Journal, str]]:
    server = serve_metrics(tmp_path / "rounds.jsonl", port=0)
    try:
        yield Journal(tmp_path / "rounds.jsonl"), f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()


def read(address: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    from prometheus_client.parser import text_string_to_metric_families

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(address, timeout=5) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {
        (sample.name, tuple(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def test_a_scraper_reads_the_newest_round(served: tuple[Journal, str]) -> None:
    journal, address = served
    assert read(address) == {("fl_elastic_up", ()): 0.0}
    journal.append(ENTRY)
    journal.append(ENTRY | {"round": 4})
    found = read(address)
    assert found[("fl_elastic_round", ())] == 4
    assert found[("fl_elastic_uplink_bytes_total", ())] == 1000
    assert found[("fl_elastic_node_step_seconds", (("node", 'p"i\n0'),))] == 0.25
    assert found[("fl_elastic_node_step_seconds", (("node", "pi1"),))] == 0.5
    assert found[("fl_elastic_seconds_since_last_entry", ())] > 1e6
    assert not any("deadline" in name or "coverage" in name for name, _ in found)


def test_a_taken_port_is_said_in_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(FleetError, match=r"cannot serve metrics on 127\.0\.0\.1"):
            serve_metrics(tmp_path / "x", port=taken.getsockname()[1])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from(["time", "nodes", "x-y", "", "9"]), json_values))
def test_whatever_a_journal_holds_names_are_those_prometheus_allows(entry: dict[str, Any]) -> None:
    for metric in journal_metrics(entry, 0.0):
        assert metric.name.replace("_", "a").isalnum() and metric.name.isascii()
        assert isinstance(metric.value, float)


def test_what_a_node_says_of_itself_stays_small_and_apart(served: tuple[Journal, str]) -> None:
    journal, address = served
    said: dict[str, Any] = {f"key{n}": n for n in range(5000)}
    odd: dict[str, Any] = {"a.b": 1.0, "a_b": 2.0, "y" * 5000: 1.0, "huge": 10**400}
    journal.append({"round": 1, "node_steps": 9, "nodes": {"pi0": said, "pi1": odd | {"steps": 4}}})
    found = read(address)
    assert len(found) < 600
    assert found[("fl_elastic_node_a_b", (("node", "pi1"),))] == 1.0
    assert found[("fl_elastic_node_a_b_2", (("node", "pi1"),))] == 2.0
    assert found[("fl_elastic_node_steps", ())] == 9
    assert not any(len(name) > 240 or "huge" in name for name, _ in found)
