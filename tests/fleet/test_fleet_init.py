"""``fleet init``: everything is made once, kept for ever, and mended where it was spoiled."""

from __future__ import annotations

import os
import subprocess
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fleet_folders import content, done, make_fleet

from fl_elastic.errors import FleetError
from fl_elastic.fleet.authority import addresses_of, read_certificate
from fl_elastic.fleet.inventory import load_inventory
from fl_elastic.fleet.layout import FleetFolder
from fl_elastic.fleet.node_settings import load_node_settings
from fl_elastic.fleet.private_files import mode_of, write_file
from fl_elastic.fleet.provision import Wanted, numbered, provision

SECRETS = ("authority/ca.key", "server/server.key", "nodes/pi0/node.key", "nodes/pi1/node.key")


def test_everything_is_made(tmp_path: Path) -> None:
    folder = make_fleet(tmp_path / "fleet", "pi0", "pi1")
    assert set(content(folder.root)) == {
        *SECRETS, ".lock", "fleet.toml", "authority/ca.crt", "server/server.crt", "server/ca.crt",
        "nodes/pi0/node.key.pub", "nodes/pi0/ca.crt", "nodes/pi0/node.toml",
        "nodes/pi1/node.key.pub", "nodes/pi1/ca.crt", "nodes/pi1/node.toml",
        "operator/config.toml", "app/pyproject.toml", "app/fleet_app.py",
    }  # fmt: skip
    inventory = load_inventory(folder.inventory)
    assert [node.config["partition-id"] for node in inventory.nodes] == [0, 1]
    settings = load_node_settings(folder.node("pi1").settings)
    assert (settings.name, settings.config) == ("pi1", {"partition-id": 1})
    assert settings.server.addresses == ("127.0.0.1",)


def test_secrets_are_their_owners_alone(tmp_path: Path) -> None:
    folder = make_fleet(tmp_path / "fleet", "pi0", "pi1")
    for name in SECRETS:
        assert mode_of(folder.root / name) == 0o600
    for place in (folder.authority, folder.server, folder.nodes, folder.node("pi0").root):
        assert mode_of(place) == 0o700


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_a_secret_is_never_readable_by_others_not_even_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int
) -> None:
    modes = []
    write, replace = os.fsync, os.replace

    def look(descriptor: int) -> None:
        modes.append(os.fstat(descriptor).st_mode & 0o777)
        write(descriptor)

    def look_again(source: Path, target: Path) -> None:
        modes.append(mode_of(Path(source)))
        replace(source, target)
        modes.append(mode_of(Path(target)))

    opened = []
    real_open = os.open

    def open_and_look(path: str, flags: int, mode: int = 0o777, **more: object) -> int:
        descriptor = real_open(path, flags, mode, **more)  # type: ignore[arg-type]
        if str(path).endswith(".tmp"):
            opened.append(os.fstat(descriptor).st_mode & 0o777)
        return descriptor

    monkeypatch.setattr(os, "fsync", look)
    monkeypatch.setattr(os, "replace", look_again)
    monkeypatch.setattr(os, "open", open_and_look)
    before = os.umask(umask)
    try:
        write_file(tmp_path / "secret", b"key", 0o600)
    finally:
        os.umask(before)
    assert opened == [0o600] and modes == [0o600] * 3


def test_a_leftover_of_a_crash_and_the_umask_do_not_decide_who_reads(tmp_path: Path) -> None:
    leftover = tmp_path / f".secret.{os.getpid()}.tmp"
    leftover.write_bytes(b"")
    leftover.chmod(0o666)
    before = os.umask(0o077)
    try:
        write_file(tmp_path / "secret", b"key", 0o600)
        write_file(tmp_path / "public", b"certificate", 0o644)
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "secret") == 0o600
    assert mode_of(tmp_path / "public") == 0o644


def test_a_second_init_keeps_everything_byte_for_byte(tmp_path: Path) -> None:
    folder = make_fleet(tmp_path / "fleet", "pi0", "pi1")
    before = content(folder.root)
    changes = provision(folder, Wanted())
    assert content(folder.root) == before
    assert {change.what for change in changes} == {"kept"}


def test_missing_parts_are_added_and_nothing_else_changes(tmp_path: Path) -> None:
    folder = make_fleet(tmp_path / "fleet", "pi0")
    before = content(folder.root)
    for name in (
        "nodes/pi0/node.key.pub",
        "nodes/pi0/ca.crt",
        "operator/config.toml",
        "server/ca.crt",
    ):
        (folder.root / name).unlink()
    provision(folder, Wanted())
    assert content(folder.root) == before


def test_more_nodes_can_be_wanted_later(tmp_path: Path) -> None:
    folder = make_fleet(tmp_path / "fleet", "pi0")
    before = content(folder.root)
    provision(folder, Wanted(nodes=("pi0", *numbered(2))))
    after = content(folder.root)
    assert {name: after[name] for name in before if name != "fleet.toml"} == {
        name: data for name, data in before.items() if name != "fleet.toml"
    }
    names = [node.name for node in load_inventory(folder.inventory).nodes]
    assert names == ["pi0", "node0", "node1"]


def test_other_addresses_give_another_certificate_of_the_same_key(tmp_path: Path) -> None:
    folder = make_fleet(tmp_path / "fleet", "pi0")
    before = content(folder.root)
    changes = provision(folder, Wanted(addresses=("server.lan", "127.0.0.1")))
    after = content(folder.root)
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {
        "server/server.crt",
        "fleet.toml",
        "nodes/pi0/node.toml",
        "operator/config.toml",
    }
    assert "server.lan" in done(changes, "updated")["server.crt"]
    found = read_certificate(after["server/server.crt"], "")
    assert "server.lan" in addresses_of(found)


def test_permissions_are_mended_and_it_says_so(tmp_path: Path) -> None:
    folder = make_fleet(tmp_path / "fleet", "pi0")
    folder.ca_key.chmod(0o644)
    folder.node("pi0").key.chmod(0o640)
    folder.authority.chmod(0o755)
    folder.server_key.chmod(0o400)
    changes = provision(folder, Wanted())
    assert set(done(changes, "repaired")) == {"ca.key", "node.key", "authority"}
    assert "644" in done(changes, "repaired")["ca.key"]
    assert mode_of(folder.ca_key) == mode_of(folder.node("pi0").key) == 0o600
    assert mode_of(folder.authority) == 0o700
    assert mode_of(folder.server_key) == 0o400  # stricter than needed is somebody's wish


def test_the_authoritys_key_may_be_kept_elsewhere(tmp_path: Path) -> None:
    folder = make_fleet(tmp_path / "fleet", "pi0")
    folder.ca_key.rename(tmp_path / "safe.key")
    provision(folder, Wanted(nodes=("pi1",)))
    assert not folder.ca_key.exists()
    with pytest.raises(FleetError, match="put the authority's key back"):
        provision(folder, Wanted(addresses=("server.lan",)))
    (tmp_path / "safe.key").rename(folder.ca_key)
    provision(folder, Wanted(addresses=("server.lan",)))


def test_a_lost_certificate_of_the_authority_is_restored_from_a_copy(tmp_path: Path) -> None:
    folder = make_fleet(tmp_path / "fleet", "pi0")
    before = folder.ca.read_bytes()
    folder.ca.unlink()
    folder.server_ca.unlink()
    changes = provision(folder, Wanted())
    assert folder.ca.read_bytes() == folder.server_ca.read_bytes() == before
    assert "pi0" in done(changes, "repaired")["ca.crt"]


def test_a_nodes_private_key_may_be_on_the_device_only(tmp_path: Path) -> None:
    folder = make_fleet(tmp_path / "fleet", "pi0")
    folder.node("pi0").key.unlink()
    before = content(folder.root)
    provision(folder, Wanted())
    assert content(folder.root) == before


def test_a_node_that_lost_both_halves_of_its_key_gets_no_new_one_in_silence(tmp_path: Path) -> None:
    folder = make_fleet(tmp_path / "fleet", "pi0")
    folder.node("pi0").key.unlink()
    folder.node("pi0").public_key.unlink()
    with pytest.raises(FleetError, match="fleet rotate DIR pi0"):
        provision(folder, Wanted())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("authority/ca.key", "not a private key"),
        ("authority/ca.crt", "not a certificate"),
        ("server/server.key", "not a private key"),
        ("server/server.crt", "not a certificate"),
        ("nodes/pi0/node.key", "not an elliptic-curve key"),
        ("fleet.toml", "damaged"),
    ],
)
def test_a_damaged_file_is_named_and_left_alone(tmp_path: Path, name: str, words: str) -> None:
    folder = make_fleet(tmp_path / "fleet", "pi0")
    (folder.root / name).write_bytes(b"\x00nonsense")
    before = content(folder.root)
    with pytest.raises(FleetError, match=words) as raised:
        provision(folder, Wanted())
    assert Path(name).name in str(raised.value)
    assert content(folder.root) == before


def test_keys_of_different_authorities_are_not_mixed(tmp_path: Path) -> None:
    one, two = make_fleet(tmp_path / "one"), make_fleet(tmp_path / "two")
    one.ca_key.write_bytes(two.ca_key.read_bytes())
    with pytest.raises(FleetError, match="does not belong to"):
        provision(one, Wanted())


def test_an_expired_certificate_is_issued_anew(tmp_path: Path) -> None:
    folder = make_fleet(tmp_path / "fleet")
    later = datetime.now(UTC) + timedelta(days=800)
    changes = provision(folder, Wanted(), now=lambda: later)
    assert "ends on" in done(changes, "updated")["server.crt"]
    found = read_certificate(folder.server_certificate.read_bytes(), "")
    assert found.not_valid_after_utc > later + timedelta(days=700)


def test_a_swapped_key_belongs_to_another_registration(tmp_path: Path) -> None:
    folder = make_fleet(tmp_path / "fleet", "pi0", "pi1")
    inventory = load_inventory(folder.inventory)
    node = inventory.node("pi0")
    text = folder.inventory.read_text().replace('name = "pi0"', 'name = "pi0"\nnode-id = "7"')
    folder.inventory.write_text(text)
    folder.node("pi0").key.write_bytes(folder.node("pi1").key.read_bytes())
    provision(folder, Wanted())
    swapped = load_inventory(folder.inventory).node("pi0")
    assert swapped.fingerprint != node.fingerprint
    assert (swapped.node_id, swapped.retired) == (None, ("7",))


def test_a_new_fleet_needs_an_address(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match="--server-address"):
        provision(FleetFolder(tmp_path / "fleet"), Wanted(nodes=("pi0",)))
    assert not (tmp_path / "fleet").exists()


def test_a_bad_name_changes_nothing(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match="node name"):
        make_fleet(tmp_path / "fleet", "../pi0")
    assert not (tmp_path / "fleet").exists()


def test_nodes_without_an_inventory_are_not_taken_for_a_new_fleet(tmp_path: Path) -> None:
    folder = make_fleet(tmp_path / "fleet", "pi0")
    folder.inventory.unlink()
    with pytest.raises(FleetError, match="restore it from a backup"):
        provision(folder, Wanted(addresses=("127.0.0.1",)))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(FleetError, match="cannot make folder"):
            make_fleet(tmp_path / "fleet")
    finally:
        tmp_path.chmod(0o700)


def test_two_at_a_time_lose_nothing(tmp_path: Path) -> None:
    folder = make_fleet(tmp_path / "fleet")
    threads = [
        threading.Thread(target=provision, args=(folder, Wanted(nodes=(f"pi{number}",))))
        for number in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    nodes = load_inventory(folder.inventory).nodes
    assert sorted(node.name for node in nodes) == [f"pi{number}" for number in range(6)]
    assert sorted(node.config["partition-id"] for node in nodes) == list(range(6))


def test_the_fingerprint_is_what_ssh_keygen_says(tmp_path: Path) -> None:
    folder = make_fleet(tmp_path / "fleet", "pi0")
    try:
        listed = subprocess.run(
            ["ssh-keygen", "-l", "-f", str(folder.node("pi0").public_key)],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    except FileNotFoundError:
        pytest.skip("ssh-keygen is not installed")
    bits, shown, comment, kind = listed.stdout.split()
    assert shown == load_inventory(folder.inventory).node("pi0").fingerprint
    assert (bits, comment, kind) == ("384", "pi0", "(ECDSA)")
