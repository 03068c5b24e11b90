"""Nodes and the server die, by real kills of real processes: only the victim's work in flight is lost."""

from __future__ import annotations

import time

import pytest
from faulty_fleet import improved, note, rounds_of, scenario_text, training, wait_until
from watched_fleet import WatchedFleet

from fl_elastic.fleet.local import SERVER

pytestmark = [pytest.mark.deploy, pytest.mark.slow, pytest.mark.faults]


def test_a_node_that_is_killed_while_it_trains_costs_its_own_update_alone() -> None:
    with WatchedFleet(3, config={"threads": 1}) as fleet:
        run = fleet.submit(scenario=scenario_text(3, rounds=4), results=str(fleet.folder.results))
        wait_until(lambda: len(rounds_of(fleet)) >= 1, 120, "the first round")
        victim = fleet.names[1]
        wait_until(lambda: training(fleet.members[victim].process.pid), 60, "the victim to train")
        fleet.kill(victim)
        killed, before = time.monotonic(), len(rounds_of(fleet))
        wait_until(lambda: len(rounds_of(fleet)) > before, 150, "the round to end without it")
        recovery = time.monotonic() - killed
        hurt = rounds_of(fleet)[before]
        assert sorted(hurt["nodes"]) == [fleet.names[0], fleet.names[2]]
        # Started again as systemd does, it is let in once the server has noticed that it was gone.
        fleet.wait_back([victim], 150)
        back = time.monotonic() - killed
        state = fleet.wait(run)
        assert state.completed, state
        assert improved(fleet)
        lines = rounds_of(fleet)
        assert [line["round"] for line in lines] == [1, 2, 3, 4]
        assert lines[0]["accepted"] == 3
        note("node killed while training", lost="its update of one round",
             round_ended_after=recovery, back_after=back)  # fmt: skip


@pytest.mark.parametrize("off_seconds", [5, 75])
def test_a_node_whose_power_was_cut_comes_back(off_seconds: int) -> None:
    with WatchedFleet(2, config={"threads": 1}) as fleet:
        victim = fleet.names[1]
        run = fleet.submit(scenario=scenario_text(2, rounds=3), results=str(fleet.folder.results))
        wait_until(lambda: len(rounds_of(fleet)) >= 1, 120, "the first round")
        fleet.kill(victim)
        killed = time.monotonic()
        time.sleep(off_seconds)
        fleet.start(victim)
        fleet.wait_back([victim], 150)
        back = time.monotonic() - killed
        assert fleet.wait(run).completed
        # In the next run it is there from the first round on, with what it had kept on its disk.
        again = fleet.submit(
            scenario=scenario_text(2, rounds=4), results=str(fleet.folder.results), resume=True
        )
        assert fleet.wait(again).completed
        last = rounds_of(fleet)[-1]
        assert last["round"] == 4 and last["accepted"] == 2
        assert improved(fleet)
        state = fleet.folder.root / "state" / victim
        assert len(list(state.glob("full/0/profile-*.state"))) == 1
        note(f"power of a node off for {off_seconds} s", lost="its update of one round at most",
             back_after=back)  # fmt: skip


def test_a_server_that_is_killed_in_a_round_goes_on_from_its_checkpoint() -> None:
    with WatchedFleet(2, config={"threads": 1}) as fleet:
        run = fleet.submit(scenario=scenario_text(2, rounds=5), results=str(fleet.folder.results))
        wait_until(lambda: len(rounds_of(fleet)) >= 2, 180, "two rounds")
        wait_until(
            lambda: training(fleet.members[fleet.names[0]].process.pid), 60, "a node to train"
        )
        fleet.kill(SERVER)
        killed, done = time.monotonic(), rounds_of(fleet)[-1]["round"]
        fleet.start(SERVER)
        fleet.wait_for_server()
        # Nodes come back by themselves; keys are still known.
        fleet.wait_online(fleet.names, 150)
        back = time.monotonic() - killed
        again = fleet.submit(
            scenario=scenario_text(2, rounds=5), results=str(fleet.folder.results), resume=True
        )
        wait_until(lambda: rounds_of(fleet)[-1]["round"] > done, 150, "a round after the restart")
        recovery = time.monotonic() - killed
        assert fleet.wait(again).completed
        lines = [line["round"] for line in rounds_of(fleet)]
        # Every round once; at most the line of the one that was checkpointed last is missing.
        assert lines == sorted(set(lines)) and lines[-1] == 5
        assert set(range(1, 6)) - set(lines) <= {done + 1}
        assert all(line["accepted"] == 2 for line in rounds_of(fleet))
        assert improved(fleet)
        # Flower itself never goes on with it.
        wait_until(lambda: fleet.flower.run_state(run).finished, 180, "the old run to be given up")
        assert fleet.flower.run_state(run).status == "finished:failed"
        note("server killed in a round", lost="the round in flight", nodes_back_after=back,
             next_round_after=recovery)  # fmt: skip
