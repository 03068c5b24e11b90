"""Links that lose and break, disks that are full: rounds go on, and what was lost is said."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from faulty_fleet import Outsider, improved, note, rounds_of, scenario_text, wait_until
from slow_link import BadLink
from small_disk import small_disk
from watched_fleet import WatchedFleet

from fl_elastic.fleet.inventory import load_inventory
from fl_elastic.fleet.local import free_ports
from fl_elastic.fleet.members import add_node
from fl_elastic.fleet.register import register

pytestmark = [pytest.mark.deploy, pytest.mark.slow, pytest.mark.faults]


def test_a_node_whose_disk_fills_up_trains_on(tmp_path: Path) -> None:
    """It fills up after the first round; Flower itself needs room for an app that it has not seen yet."""
    disk = tmp_path / "disk"
    with small_disk(disk, "2m"):
        settings = {"state-dir": str(disk / "node")}
        with WatchedFleet(2, config={"threads": 1}, node_config=[{}, settings]) as fleet:
            run = fleet.submit(
                scenario=scenario_text(2, rounds=5), results=str(fleet.folder.results)
            )
            wait_until(lambda: len(rounds_of(fleet)) >= 1, 120, "the first round")
            for profile in (disk / "node").rglob("profile-*.state"):
                profile.unlink()
            _fill(disk)
            state = fleet.wait(run)
            assert state.completed, state
            accepted = [line["accepted"] for line in rounds_of(fleet)]
            assert accepted == [2] * 5
            # It had no room to keep its costs, and measured them anew in every round.
            assert not list((disk / "node").rglob("profile-*.state"))
            assert improved(fleet)
            note("node's disk full", lost="its cost profile, measured again in every round",
                 accepted=accepted)  # fmt: skip


def _fill(disk: Path) -> None:
    """Write until there is no room, not even for a few bytes."""
    with (disk / "rest").open("wb", buffering=0) as stream:
        for size in (65536, 4096, 1):
            try:
                while True:
                    stream.write(b"x" * size)
            except OSError:
                continue


def test_a_server_whose_disk_is_full_says_so_and_goes_on_once_there_is_room(
    tmp_path: Path,
) -> None:
    disk = tmp_path / "disk"
    # Room for two checkpoints of the model, with what Flower logs.
    with (
        small_disk(disk, "520k"),
        WatchedFleet(2, config={"threads": 1}) as fleet,
    ):
        run = fleet.submit(scenario=scenario_text(2, rounds=6), results=str(disk / "results"))
        state = fleet.wait(run)
        assert state.status == "finished:failed", state
        assert "cannot write checkpoint" in state.details + fleet.log("server")
        kept = sorted((disk / "results" / "checkpoints").glob("round-*.state"))
        assert kept
        more = subprocess.run(
            ["mount", "-o", "remount,size=64m", str(disk)], capture_output=True, check=False
        )
        assert more.returncode == 0
        started = time.monotonic()
        again = fleet.submit(
            scenario=scenario_text(2, rounds=6), results=str(disk / "results"), resume=True
        )
        assert fleet.wait(again).completed
        from fl_elastic.monitoring.journal import read_journal

        lines = read_journal(disk / "results" / "rounds.jsonl")
        assert lines[-1]["round"] == 6 and lines[-1]["accuracy"] > lines[0]["accuracy"] + 0.3
        resumed_from = int(kept[-1].stem.removeprefix("round-"))
        note("server's disk full", lost="the round whose checkpoint did not fit",
             resumed_after_round=resumed_from, seconds_to_the_end=time.monotonic() - started)  # fmt: skip


def test_a_link_that_loses_and_is_cut_for_a_minute_costs_rounds_of_that_node_alone() -> None:
    """300 ms of delay, a fifth of the chunks lost; then nothing at all for a minute."""
    with WatchedFleet(1, config={"threads": 1}) as fleet:
        server = load_inventory(fleet.folder.inventory).server
        link = BadLink(server.port, delay=0.3, loss=0.2)
        try:
            far = _far_node(fleet, link.port)
            with Outsider(fleet, far, {}) as node:
                wait_until(lambda: far in fleet.online(), 180, "the far node to be online")
                run = fleet.submit(
                    scenario=scenario_text(2, rounds=8), results=str(fleet.folder.results),
                    round_timeout=90.0,
                )  # fmt: skip
                wait_until(lambda: len(rounds_of(fleet)) >= 2, 300, "two rounds over the bad link")
                assert all(far in line["nodes"] for line in rounds_of(fleet))
                link.cut()
                cut = time.monotonic()
                time.sleep(60)
                link.mend()
                wait_until(
                    lambda: far in fleet.online() or "Giving up reconnection" in node.said(),
                    150, "the far node to be back, or to give up",
                )  # fmt: skip
                gave_up = "Giving up reconnection" in node.said()
            # Flower's node gives up over a handshake that timed out, and neither ends nor tries again: the health
            # timer of a device restarts it, as is done here.
            with _started_until_it_stays(fleet, far):
                back = time.monotonic() - cut
                state = fleet.wait(run)
                if rounds_of(fleet)[-1]["accepted"] < 2:
                    # The run was over before it was back: it takes part in the next one.
                    again = fleet.submit(
                        scenario=scenario_text(2, rounds=9), results=str(fleet.folder.results),
                        resume=True,
                    )  # fmt: skip
                    assert fleet.wait(again).completed
                assert state.completed, state
                lines = rounds_of(fleet)
                assert all("node0" in line["nodes"] for line in lines) and len(lines) >= 8
                assert far in lines[-1]["nodes"]
                missed = [line["round"] for line in lines if far not in line["nodes"]]
                assert missed and link.lost > 0
                assert improved(fleet)
                note("link with 300 ms delay and 20 % loss, cut for a minute",
                     lost=f"rounds {missed} of that node", back_after_cut=back, gave_up=gave_up,
                     seconds_per_round=[round(line["round_seconds"], 1) for line in lines],
                     chunks=link.chunks, lost_chunks=link.lost)  # fmt: skip
        finally:
            link.close()


@contextmanager
def _started_until_it_stays(fleet: WatchedFleet, name: str) -> Iterator[None]:
    """Start a node again and again, as a service manager does, until the server lets it in."""
    for _ in range(12):
        with Outsider(fleet, name, {}) as node:
            wait_until(lambda: node.ended or _registered_anew(fleet, name, node), 120, "an answer")
            if not node.ended:
                yield
                return
        time.sleep(5)
    pytest.fail(f"{name} was not let in again: {node.said()[-500:]}")


def _registered_anew(fleet: WatchedFleet, name: str, node: Outsider) -> bool:
    """Whether this process is online, and not one before it that the server has not missed yet."""
    return "SuperNode ID" in node.said() and name in fleet.online()


def _far_node(fleet: WatchedFleet, port: int) -> str:
    """A node whose settings name the link's port in place of the server's."""
    name, state = "far", fleet.folder.root / "state" / "far"
    config = {
        "state-dir": str(state), "partition-id": 1, "threads": 1, "runtime-port": free_ports(1)[0],
    }  # fmt: skip
    add_node(fleet.folder, name, config)
    register(fleet.folder, fleet.flower)
    settings = fleet.folder.node(name).settings
    own = load_inventory(fleet.folder.inventory).server.port
    text = settings.read_text()
    assert f"port = {own}\n" in text
    settings.write_text(text.replace(f"port = {own}\n", f"port = {port}\n"))
    return name
