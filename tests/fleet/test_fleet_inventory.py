"""``fleet.toml`` and ``node.toml``: what is written is read again, and nonsense is one clear line."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleet_folders import make_fleet
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_elastic.errors import FleetError
from fl_elastic.fleet.inventory import (
    Inventory,
    Node,
    Server,
    load_inventory,
    next_partition,
    save_inventory,
)
from fl_elastic.fleet.node_settings import load_node_settings, node_settings_bytes

scalars = st.one_of(
    st.booleans(),
    st.integers(-(2**62), 2**62),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=("Cs",))),
)
keys = st.from_regex(r"[a-z][a-z-]{0,10}", fullmatch=True)
configs = st.dictionaries(keys, scalars, max_size=4)
nodes = st.builds(
    Node,
    name=st.from_regex(r"[a-z0-9]{1,8}", fullmatch=True),
    fingerprint=st.text("abc:", max_size=8),
    node_id=st.none() | st.integers(0, 2**64 - 1).map(str),
    retired=st.lists(st.integers(0, 2**64 - 1).map(str), max_size=2).map(tuple),
    revoked=st.booleans(),
    config=configs,
)
inventories = st.builds(
    Inventory,
    server=st.builds(Server, st.just(("server.lan", "::1")), st.integers(1, 65535)),
    nodes=st.lists(nodes, max_size=3, unique_by=lambda node: node.name).map(tuple),
    revoked_keys=st.lists(st.text("abc", min_size=1), max_size=2).map(tuple),
)


@settings(max_examples=50)
@given(inventory=inventories)
def test_an_inventory_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, inventory: Inventory
) -> None:
    path = tmp_path_factory.mktemp("inventory") / "fleet.toml"
    assert save_inventory(path, inventory)
    assert load_inventory(path) == inventory
    assert not save_inventory(path, inventory)


@settings(max_examples=50)
@given(node=nodes)
def test_a_nodes_settings_are_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, node: Node
) -> None:
    path = tmp_path_factory.mktemp("node") / "node.toml"
    path.write_bytes(node_settings_bytes(Server(("server.lan",), 8000), node))
    found = load_node_settings(path)
    assert (found.name, found.config) == (node.name, node.config)


def replaced(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("version = 1", "version = 2", "version 2, expected 1"),
        ("version = 1", "version = ", "damaged"),
        ("port = 8000", 'port = "8000"', "server.port: expected a whole number, got '8000'"),
        ("port = 8000", "", "server.port: missing"),
        ("revoked = false", "revoked = 0", "expected true or false"),
        ('"127.0.0.1"', '"http://x"', "server address"),
        ('"127.0.0.1"', "7", "expected text"),
        ('name = "pi0"', 'name = "../pi0"', "node name"),
        ('name = "pi0"', 'name = "pi1"', "two nodes have the same name"),
        ('name = "pi0"', "", "node.0.name: missing"),
        ("retired = []", 'retired = ["--help"]', "expected digits"),
        ("retired = []", "retired = 7", "expected a list"),
        (
            "partition-id = 0",
            "partition-id = [0]",
            "node.0.config.partition-id: expected a number, true",
        ),
        ("[server]", "[elsewhere]", "server: missing"),
        ("revoked = false", "revokd = false", "revokd: unknown key (did you mean 'revoked'?)"),
    ],
)
def test_what_means_nothing_is_said_with_the_file(
    tmp_path: Path, old: str, new: str, words: str
) -> None:
    folder = make_fleet(tmp_path / "fleet", "pi0", "pi1")
    replaced(folder.inventory, old, new)
    with pytest.raises(FleetError) as raised:
        load_inventory(folder.inventory)
    assert words in str(raised.value) and str(folder.inventory) in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[node]", "[none]", "node.name: missing"),
        ('name = "pi0"', "name = 7", "expected text"),
        ("port = 8000", "port = 0", "1 to 65535"),
        (
            "partition-id = 0",
            "partition-id = {}",
            "or text, got a table",
        ),
        ("[server]", "[[server]]", "expected a table"),
        ("[server]", "[server", "damaged"),
    ],
)
def test_a_nodes_file_that_means_nothing_says_where_to_get_another(
    tmp_path: Path, old: str, new: str, words: str
) -> None:
    path = make_fleet(tmp_path / "fleet", "pi0").node("pi0").settings
    replaced(path, old, new)
    with pytest.raises(FleetError) as raised:
        load_node_settings(path)
    assert words in str(raised.value) and "again" in str(raised.value)


def test_missing_files_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match="fl-elastic fleet init"):
        load_inventory(tmp_path / "fleet.toml")
    with pytest.raises(FleetError, match="nodes/NAME"):
        load_node_settings(tmp_path / "node.toml")


def test_partitions_start_at_zero_and_fill_gaps() -> None:
    assert next_partition(Inventory(Server(("a",), 8000))) == 0
    taken = tuple(Node(f"n{i}", config={"partition-id": i}) for i in (0, 2))
    assert next_partition(Inventory(Server(("a",), 8000), taken)) == 1


@pytest.mark.parametrize("depth", [50, 500, 990, 5_000, 20_000])
@pytest.mark.parametrize("where", ["{0} = {1}", "version = 1\nserver = {1}", "[{2}]\nx = 1"])
def test_values_nested_to_any_depth_are_one_error(depth: int, where: str, tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    nested = "[" * depth + "]" * depth
    path.write_text(where.format("x", nested, ".".join("a" * 1 for _ in range(depth))))
    with pytest.raises(FleetError) as caught:
        load_inventory(path)
    assert "\n" not in str(caught.value)
