"""Nodes that are added, revoked and given other keys, as far as files go."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from fleet_folders import content, done, make_fleet

from fl_elastic.errors import FleetError
from fl_elastic.fleet.authority import key_from_pem, read_certificate
from fl_elastic.fleet.inventory import load_inventory, save_inventory
from fl_elastic.fleet.layout import FleetFolder
from fl_elastic.fleet.members import add_node, revoke_node, rotate_node, rotate_server
from fl_elastic.fleet.node_settings import load_node_settings
from fl_elastic.fleet.private_files import mode_of
from fl_elastic.fleet.provision import Wanted, provision


@pytest.fixture
def folder(tmp_path: Path) -> FleetFolder:
    made = make_fleet(tmp_path / "fleet", "pi0", "pi1")
    inventory = load_inventory(made.inventory)
    known = replace(inventory.node("pi0"), node_id="12345678901234567890")
    save_inventory(made.inventory, inventory.with_node(known))
    return made


def test_a_node_is_added_with_its_settings(folder: FleetFolder) -> None:
    add_node(folder, "pi2", {"deadline": 60.0, "data-root": "/srv/my data"})
    node = load_inventory(folder.inventory).node("pi2")
    assert node.config == {"partition-id": 2, "deadline": 60.0, "data-root": "/srv/my data"}
    assert load_node_settings(folder.node("pi2").settings).config == node.config
    assert mode_of(folder.node("pi2").key) == 0o600


def test_adding_again_changes_settings_and_no_key(folder: FleetFolder) -> None:
    before = content(folder.root)
    add_node(folder, "pi0", {"threads": 2})
    after = content(folder.root)
    assert {name for name in after if after[name] != before[name]} == {
        "fleet.toml", "nodes/pi0/node.toml",
    }  # fmt: skip
    assert load_inventory(folder.inventory).node("pi0").node_id == "12345678901234567890"


def test_a_freed_partition_is_given_again(folder: FleetFolder) -> None:
    add_node(folder, "pi0", {"partition-id": 9})
    add_node(folder, "pi2", {})
    assert load_inventory(folder.inventory).node("pi2").config["partition-id"] == 0


def test_revoking_keeps_the_key_and_never_takes_it_again(folder: FleetFolder) -> None:
    before = content(folder.root)
    node = revoke_node(folder, "pi0")
    assert (node.revoked, node.node_id, node.retired) == (True, None, ("12345678901234567890",))
    after = content(folder.root)
    assert {name for name in after if after[name] != before[name]} == {"fleet.toml"}
    assert load_inventory(folder.inventory).revoked_keys == (node.fingerprint,)
    with pytest.raises(FleetError, match="pi0 is revoked"):
        add_node(folder, "pi0", {})
    provision(folder, Wanted(nodes=("pi0",)))
    assert load_inventory(folder.inventory).node("pi0").revoked


def test_a_rotated_node_has_another_key_and_is_trusted_again(folder: FleetFolder) -> None:
    old = load_inventory(folder.inventory).node("pi0")
    before = folder.node("pi0").key.read_bytes()
    revoke_node(folder, "pi0")
    changes = rotate_node(folder, "pi0")
    assert "copy the folder" in done(changes, "updated")["node.key"]
    inventory = load_inventory(folder.inventory)
    new = inventory.node("pi0")
    assert folder.node("pi0").key.read_bytes() != before
    assert mode_of(folder.node("pi0").key) == 0o600
    assert not list(folder.node("pi0").root.glob("*.old"))
    assert not new.revoked and new.fingerprint != old.fingerprint
    assert (new.node_id, new.retired) == (None, ("12345678901234567890",))
    assert inventory.revoked_keys == (old.fingerprint,)
    assert {c.what for c in provision(folder, Wanted())} == {"kept"}


def test_a_rotation_that_was_cut_short_is_mended_by_init(
    folder: FleetFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fl_elastic.fleet import members

    before, written = content(folder.root), []

    def write_once(path: Path, data: bytes, mode: int) -> None:
        if written:
            raise FleetError("power cut")
        written.append(path)
        path.write_bytes(data)

    monkeypatch.setattr(members, "write_file", write_once)
    with pytest.raises(FleetError, match="power cut"):
        rotate_node(folder, "pi0")
    provision(folder, Wanted())
    assert content(folder.root) == before


def test_the_server_gets_another_key_by_the_same_authority(folder: FleetFolder) -> None:
    before = content(folder.root)
    rotate_server(folder, datetime.now(UTC))
    after = content(folder.root)
    assert {name for name in after if after[name] != before[name]} == {
        "server/server.key", "server/server.crt",
    }  # fmt: skip
    found = read_certificate(after["server/server.crt"], "")
    assert found.public_key() == key_from_pem(after["server/server.key"], "").public_key()
    found.verify_directly_issued_by(read_certificate(after["authority/ca.crt"], ""))


def test_unknown_nodes_are_named_with_what_there_is(folder: FleetFolder) -> None:
    for change in (revoke_node, rotate_node):
        with pytest.raises(FleetError, match=r"no node 'pi9'.*did you mean 'pi\d'.*pi0, pi1"):
            change(folder, "pi9")


def test_without_a_fleet_it_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match="fleet init"):
        add_node(FleetFolder(tmp_path), "pi0", {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("partition-id", "x", "whole number"),
        ("partition-id", -1, "partition-id: -1 is below 0"),
        ("partition-id", True, "whole number"),
        ("partition-id", 1, "pi1 has it"),
        ("threads", 1.5, "threads: expected a whole number, got 1.5"),
        ("runtime-port", 0, "runtime-port: 0 is below 1"),
        ("deadline", 0, "deadline: 0 is not above 0"),
        ("deadline", "60 s", "deadline: expected a number, got '60 s'"),
        ("speedup", 0.5, "speedup: 0.5 is below 1"),
        ("data-root", 7, "data-root: expected text, got 7"),
        (
            "sped",
            2,
            r"unknown setting 'sped' \(did you mean 'speedup'\?\): known are data-root, deadline, .*app-sped",
        ),
        ("memory", 10**6, "unknown setting 'memory': known are"),
        ("data_root", "/srv", "did you mean 'data-root'"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_changes(
    folder: FleetFolder, setting: str, value: bool | int | float | str, words: str
) -> None:
    before = content(folder.root)
    with pytest.raises(FleetError, match=words):
        add_node(folder, "pi0", {setting: value})
    assert content(folder.root) == before


def test_a_setting_that_somebody_wrote_into_the_inventory_is_refused_too(
    folder: FleetFolder,
) -> None:
    inventory = load_inventory(folder.inventory)
    odd = replace(inventory.node("pi0"), config={"partition-id": 0, "thread": 2})
    save_inventory(folder.inventory, inventory.with_node(odd))
    for change in (
        lambda: provision(folder, Wanted()),
        lambda: add_node(folder, "pi0", {"deadline": 5}),
    ):
        with pytest.raises(
            FleetError, match=r"pi0: unknown setting 'thread' \(did you mean 'threads'"
        ):
            change()


def test_a_revoked_node_frees_its_partition(folder: FleetFolder) -> None:
    revoke_node(folder, "pi1")
    add_node(folder, "pi0", {"partition-id": 1, "app-camera": "anything"})
    assert load_inventory(folder.inventory).node("pi0").config["partition-id"] == 1
