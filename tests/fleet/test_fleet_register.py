"""Registration: afterwards the server knows exactly the keys of the inventory, however often it is run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from fleet_folders import make_fleet

from fl_elastic.errors import FleetError
from fl_elastic.fleet.flower_cli import AlreadyRegistered, NodeState, ServerUnreachable
from fl_elastic.fleet.inventory import load_inventory, save_inventory
from fl_elastic.fleet.layout import FleetFolder
from fl_elastic.fleet.members import revoke_node, rotate_node
from fl_elastic.fleet.register import register


@dataclass
class Known:
    """A SuperLink's memory: a key is never taken twice, not even after it was unregistered."""

    keys: dict[bytes, str] = field(default_factory=dict)
    status: dict[str, str] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    down_after: int = 99

    def nodes(self) -> list[NodeState]:
        return [NodeState(node_id, status) for node_id, status in self.status.items()]

    def register(self, public_key: Path, name: str) -> str:
        if len(self.calls) >= self.down_after:
            raise ServerUnreachable("gone")
        key = public_key.read_bytes().split()[1]
        if key in self.keys:
            raise AlreadyRegistered("Public key already in use")
        node_id = str(2**63 + len(self.keys))
        self.keys[key], self.status[node_id] = node_id, "registered"
        self.calls.append(f"register {name}")
        return node_id

    def unregister(self, node_id: str) -> None:
        self.status[node_id] = "unregistered"
        self.calls.append(f"unregister {node_id}")

    @property
    def alive(self) -> set[str]:
        return {node_id for node_id, status in self.status.items() if status != "unregistered"}


@pytest.fixture
def folder(tmp_path: Path) -> FleetFolder:
    return make_fleet(tmp_path / "fleet", "pi0", "pi1")


def said(folder: FleetFolder, known: Known) -> list[tuple[str, str]]:
    return [(each.name, each.what) for each in register(folder, known)]


def test_all_are_registered_once(folder: FleetFolder) -> None:
    known = Known()
    assert said(folder, known) == [("pi0", "registered"), ("pi1", "registered")]
    ids = {node.node_id for node in load_inventory(folder.inventory).nodes}
    assert ids == known.alive
    before = folder.inventory.read_bytes()
    assert said(folder, known) == [("pi0", "known"), ("pi1", "known")]
    assert known.calls == ["register pi0", "register pi1"]
    assert folder.inventory.read_bytes() == before


def test_a_revoked_node_is_shut_out_and_not_let_in_again(folder: FleetFolder) -> None:
    known = Known()
    register(folder, known)
    node_id = load_inventory(folder.inventory).node("pi0").node_id
    revoke_node(folder, "pi0")
    assert said(folder, known)[0] == ("pi0", "unregistered")
    assert node_id not in known.alive and len(known.alive) == 1
    assert said(folder, known) == [("pi0", "refused"), ("pi1", "known")]
    assert load_inventory(folder.inventory).node("pi0").retired == ()


def test_a_rotated_node_comes_in_with_its_new_key_only(folder: FleetFolder) -> None:
    known = Known()
    register(folder, known)
    old = load_inventory(folder.inventory).node("pi0").node_id
    rotate_node(folder, "pi0")
    assert said(folder, known) == [("pi0", "unregistered"), ("pi0", "registered"), ("pi1", "known")]
    new = load_inventory(folder.inventory).node("pi0").node_id
    assert old not in known.alive and new in known.alive


def test_a_revoked_key_under_another_name_is_refused(folder: FleetFolder) -> None:
    revoke_node(folder, "pi0")
    folder.node("pi1").public_key.write_bytes(folder.node("pi0").public_key.read_bytes())
    known = Known()
    done = {each.name: each for each in register(folder, known)}
    assert done["pi1"].what == "refused" and "revoked" in done["pi1"].why
    assert known.calls == []


def test_an_id_that_was_not_written_down_is_found_again(folder: FleetFolder) -> None:
    known = Known()
    register(folder, known)
    inventory = load_inventory(folder.inventory)
    forgotten = replace(inventory.node("pi1"), node_id=None)
    save_inventory(folder.inventory, inventory.with_node(forgotten))
    assert said(folder, known) == [("pi0", "known"), ("pi1", "registered")]
    assert load_inventory(folder.inventory) == inventory


def test_an_id_that_cannot_be_found_is_one_refusal_and_no_guess(folder: FleetFolder) -> None:
    known = Known()
    register(folder, known)
    inventory = load_inventory(folder.inventory)
    for node in inventory.nodes:
        inventory = inventory.with_node(replace(node, node_id=None))
    save_inventory(folder.inventory, inventory)
    done = register(folder, known)
    assert [each.what for each in done] == ["refused", "refused"]
    assert "fleet rotate DIR pi0" in done[0].why


def test_what_was_done_before_the_server_went_away_is_not_forgotten(folder: FleetFolder) -> None:
    known = Known(down_after=1)
    with pytest.raises(ServerUnreachable):
        register(folder, known)
    nodes = {node.name: node.node_id for node in load_inventory(folder.inventory).nodes}
    assert nodes["pi0"] in known.alive and nodes["pi1"] is None
    known.down_after = 99
    assert said(folder, known) == [("pi0", "known"), ("pi1", "registered")]


def test_one_bad_key_does_not_keep_the_others_out(folder: FleetFolder) -> None:
    folder.node("pi0").public_key.write_text("nonsense")
    done = {each.name: each for each in register(folder, Known())}
    assert done["pi0"].what == "refused" and "public key" in done["pi0"].why
    assert done["pi1"].what == "registered"


def test_without_a_fleet_nothing_is_made(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match="fleet init"):
        register(FleetFolder(tmp_path), Known())
    assert not list(tmp_path.iterdir())
