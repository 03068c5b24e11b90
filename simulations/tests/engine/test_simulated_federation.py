"""The federation that `fl-elastic simulate` and `flwr run` run, without their processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from choosing_costs import flat_choosing, with_costs
from flwr.app import Message
from flwr.serverapp import ServerApp
from in_process_grid import InProcessGrid

from fl_elastic.errors import DatasetError, ElasticError, ScenarioError
from fl_elastic.flower.records import ERROR
from fl_elastic.profiling import CostProfile, load_profile, save_profile
from fl_elastic_simulations.engine import client as simulated_client
from fl_elastic_simulations.engine import server as simulated_server
from fl_elastic_simulations.engine import simulate as simulate_module
from fl_elastic_simulations.engine.client import simulated_client_app
from fl_elastic_simulations.engine.client_slot import ClientSlot
from fl_elastic_simulations.engine.in_process_grid import InProcessGrid as LocalGrid
from fl_elastic_simulations.engine.in_process_grid import client_processes
from fl_elastic_simulations.engine.methods import check_methods
from fl_elastic_simulations.engine.progress import LoggedProgress
from fl_elastic_simulations.engine.run_result import RunResult
from fl_elastic_simulations.engine.server import Simulation, run_methods
from fl_elastic_simulations.engine.simulate import _run, simulate
from fl_elastic_simulations.engine.summary import summarise
from fl_elastic_simulations.engine.workload import at_speed, measure_profile
from fl_elastic_simulations.scenario import Scenario

SCENARIO: dict[str, Any] = {
    "title": "small",
    "seeds": [0],
    "methods": ["full", "elastic"],
    "data": {"dataset": "digits", "train_limit": 144, "test_limit": 60, "min_examples": 20},
    "model": {"name": "digits_cnn"},
    "training": {"rounds": 2, "batch_size": 16, "learning_rate": 0.03, "momentum": 0.9},
    "fleet": [
        {"device": "pi_zero_2_w", "count": 2, "speedup": 4.0, "uplink_share": 0.5},
        {"device": "laptop", "count": 1},
    ],
}


def scenario(**changes: Any) -> Scenario:
    return Scenario.from_json(json.dumps(SCENARIO | changes))


@pytest.fixture(scope="module")
def profile() -> CostProfile:
    return measure_profile(scenario(), None)


@pytest.fixture(autouse=True)
def same_costs(profile: CostProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    with_costs(monkeypatch, profile)


class Interrupted(BaseException):
    """Stands for Ctrl-C."""


class Recorder(LoggedProgress):
    def __init__(self, interrupt_at: tuple[str, int] | None = None) -> None:
        self.cells: list[tuple[str, int]] = []
        self.rounds: list[tuple[str, int]] = []
        self._interrupt_at = interrupt_at

    def cell(self, method: str, seed: int, rounds: int) -> None:
        self.cells.append((method, seed))

    def round(self, number: int, accuracy: float, loss: float, simulated_seconds: float) -> None:
        self.rounds.append((self.cells[-1][0], number))
        assert 0 <= accuracy <= 1
        if self.rounds[-1] == self._interrupt_at:
            raise Interrupted


def grid(made: Scenario, extra: int = 0) -> InProcessGrid:
    app = simulated_client_app()
    return InProcessGrid(len(made.clients) + extra, lambda node: app)


def simulated(
    directory: Path, made: Scenario | None = None, progress: Recorder | None = None, **options: Any
) -> list[RunResult]:
    made = made or scenario()
    simulation = Simulation(made, directory, **options)
    cells, _ = run_methods(simulation, grid(made), progress or Recorder())
    return cells


def results(cells: list[RunResult]) -> list[Any]:
    """Everything but the seconds that steps took just now."""
    return [(cell.method, cell.seed, cell.history, cell.coverage, cell.rejected) for cell in cells]


@pytest.fixture(scope="module")
def whole(profile: CostProfile, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Results of the scenario in one process, without an interruption."""
    with pytest.MonkeyPatch.context() as patch:
        with_costs(patch, profile)
        return results(simulated(tmp_path_factory.mktemp("whole")))


@pytest.mark.slow
def test_clients_in_other_processes_give_the_same_results(tmp_path: Path, whole: list[Any]) -> None:
    made = scenario()
    with client_processes(simulated_client_app, 2) as processes:
        elsewhere = LocalGrid(len(made.clients), simulated_client_app(), processes=processes)
        there, _ = run_methods(Simulation(made, tmp_path / "there"), elsewhere, Recorder())
    assert results(there) == whole


@pytest.mark.slow
def test_a_process_that_was_given_the_app_does_without_the_compiler_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, done = scenario(methods=["full"]), []
    nodes = grid(made)
    monkeypatch.setattr(simulated_client, "without_compiler", lambda: done.append("lean"))
    run_methods(Simulation(made, tmp_path), nodes, Recorder())
    assert len(done) == len(made.clients) * made.training.rounds


def test_flowers_engine_takes_no_number_of_workers(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="takes all cores by itself"):
        simulate(Simulation(scenario(), tmp_path), Recorder(), workers=2)


def test_clients_hold_as_many_classes_as_the_data_say(tmp_path: Path) -> None:
    data = SCENARIO["data"] | {"partition": "pathological", "classes_per_client": 4}
    peer = {"methods": ["timelyfl"], "method": {"timelyfl": {"peer": "timelyfl"}}}
    (cell,) = simulated(tmp_path, scenario(data=data, **peer))
    assert all(sum(count > 0 for count in counts) == 4 for counts in cell.labels)
    assert cell.rejected == 0


def test_every_method_and_seed_has_its_cell(tmp_path: Path) -> None:
    made, progress = scenario(seeds=[0, 1]), Recorder()
    cells = simulated(tmp_path, made, progress)
    wanted = [("full", 0), ("elastic", 0), ("full", 1), ("elastic", 1)]
    assert [(cell.method, cell.seed) for cell in cells] == progress.cells == wanted
    assert progress.rounds[:6] == [(m, r) for m in ("full", "elastic") for r in range(3)]
    for cell in cells:
        assert len(cell.history) == 3
        assert cell.rejected == 0
        path = tmp_path / "cells" / f"{cell.method}-{cell.seed}.json"
        assert RunResult.from_json(path.read_text()) == cell
    assert cells[0].history != cells[2].history


@pytest.mark.slow
def test_a_second_run_in_the_same_folder_is_not_swayed_by_the_first(
    tmp_path: Path, whole: list[Any]
) -> None:
    """Clients keep importance on disk from round to round, but not from run to run."""
    simulated(tmp_path)
    assert results(simulated(tmp_path)) == whole


@pytest.mark.slow
def test_resume_takes_finished_cells_and_their_costs_as_they_are(
    tmp_path: Path, profile: CostProfile, monkeypatch: pytest.MonkeyPatch, whole: list[Any]
) -> None:
    with pytest.raises(Interrupted):
        simulated(tmp_path / "parts", progress=Recorder(interrupt_at=("elastic", 1)))
    kept = tmp_path / "parts" / "cells" / "full-0.json"
    before = kept.stat().st_mtime_ns
    assert sorted(path.name for path in kept.parent.iterdir()) == ["full-0.json"]
    progress = Recorder()
    # Else a host that is busier by now would make later methods slower than those before.
    busier = at_speed(profile, 2.0)
    monkeypatch.setattr(simulated_server, "measure_profile", lambda *_, known=None: known or busier)
    monkeypatch.setattr(
        simulated_server, "measure_choosing",
        lambda made, _, __, known: known if known.plan_seconds else flat_choosing(made, plan=1.0),
    )  # fmt: skip
    resumed = simulated(tmp_path / "parts", progress=progress, resume=True)
    assert kept.stat().st_mtime_ns == before
    assert {method for method, _ in progress.rounds} == {"elastic"}
    assert results(resumed) == whole


def test_costs_of_another_scenario_are_not_gone_by(tmp_path: Path) -> None:
    made = scenario(methods=["full"])
    save_profile(measure_profile(made, None), tmp_path / "profile.json")
    training = SCENARIO["training"] | {"batch_size": 8}
    with pytest.raises(ScenarioError, match=r"of another scenario \(batch_shape") as refused:
        measure_profile(
            scenario(methods=["full"], training=training), None,
            known=load_profile(tmp_path / "profile.json"),
        )  # fmt: skip
    assert "--resume" in str(refused.value)
    elastic = scenario(methods=["full", "joint"])
    known = load_profile(tmp_path / "profile.json")
    more = measure_profile(elastic, None, known=known)
    assert known.modes is None and more.modes is not None
    assert (more.forward_seconds == known.forward_seconds).all()


@pytest.mark.parametrize("content", [b'{"method": "fu', b"\xff\xfe", b""])
def test_a_damaged_cell_is_named_on_resume(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / "full-0.json").write_bytes(content)
    with pytest.raises(ScenarioError, match="stored result cannot be read") as refused:
        simulated(tmp_path, scenario(methods=["full"]), resume=True)
    assert "\n" not in str(refused.value)


def test_results_of_another_scenario_are_not_taken(tmp_path: Path) -> None:
    simulated(tmp_path, scenario(methods=["full"], training=SCENARIO["training"] | {"rounds": 1}))
    for changes in (
        {},  # of one round more
        {"data": SCENARIO["data"] | {"train_limit": 140}},
        {"method": {"full": {"codec": "fp16"}}},
    ):
        training = SCENARIO["training"] | {"rounds": 1} if changes else SCENARIO["training"]
        made = scenario(methods=["full"], training=training, **changes)
        with pytest.raises(ScenarioError, match=r"full-0.json is the result of another scenario"):
            simulated(tmp_path, made, resume=True)


@pytest.mark.slow
def test_resume_may_add_methods_and_seeds(tmp_path: Path) -> None:
    simulated(tmp_path, scenario(methods=["full"]))
    progress = Recorder()
    more = scenario(methods=["full", "head"], seeds=[0, 1], title="more")
    assert len(simulated(tmp_path, more, progress, resume=True)) == 4
    assert len(progress.rounds) == 3 * 3


def test_a_model_that_goes_down_as_fp16_takes_half_the_bytes_and_is_what_clients_train_from(
    tmp_path: Path,
) -> None:
    methods = {"full": {"policy": "full"}, "half": {"policy": "full", "downlink_codec": "fp16"}}
    made = scenario(methods=["full", "half"], method=methods, target={"method": "full"})
    cells, groups = run_methods(Simulation(made, tmp_path), grid(made), Recorder())
    found = summarise(made, cells, groups)["methods"]
    whole, half = (found[name] for name in ("full", "half"))
    assert half["downlink_bytes"] == pytest.approx(whole["downlink_bytes"] / 2, rel=0.1)
    assert half["uplink_bytes"] == pytest.approx(whole["uplink_bytes"], rel=0.01)
    assert half["simulated_seconds"] < whole["simulated_seconds"]
    assert cells[0].history[1]["loss"] != cells[1].history[1]["loss"]
    assert cells[0].history[1]["loss"] == pytest.approx(cells[1].history[1]["loss"], rel=0.05)


def test_budgets_hold_and_show_in_the_summary(tmp_path: Path) -> None:
    made = scenario()
    cells, groups = run_methods(Simulation(made, tmp_path), grid(made), Recorder())
    found = summarise(made, cells, groups)["methods"]
    assert found["elastic"]["simulated_seconds"] < 0.6 * found["full"]["simulated_seconds"]
    assert found["elastic"]["uplink_bytes"] < found["full"]["uplink_bytes"]
    assert found["full"]["coverage"]["pi_zero_2_w"] == [[1.0] * len(groups)] * 2


def test_a_client_too_many_is_left_out(tmp_path: Path) -> None:
    """A node whose number the scenario does not know reports it; the others go on."""
    made = scenario(methods=["full"])
    cells, _ = run_methods(Simulation(made, tmp_path), grid(made, extra=1), Recorder())
    assert cells[0].rejected == 2
    assert len(cells[0].history) == 3


def test_the_model_learns(tmp_path: Path) -> None:
    made = scenario(methods=["full"], training=SCENARIO["training"] | {"rounds": 4})
    history = simulated(tmp_path, made)[0].history
    assert history[-1]["accuracy"] > history[0]["accuracy"] + 0.15
    assert history[-1]["loss"] < history[0]["loss"]


def instruction(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    return {
        "scenario": scenario().to_json(),
        "method": "full",
        "seed": 0,
        "server-round": 1,
        "state-dir": str(tmp_path),
    } | changes


def test_a_run_ends_on_machines_without_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds would go on without the clients that happen to run there."""

    def nothing(*_: object, **__: object) -> None:
        raise DatasetError("no folder data/of/mine")

    monkeypatch.setattr(ClientSlot, "batches", nothing)
    with pytest.raises(ScenarioError, match=r"lacks the scenario's data: no folder data/of/mine"):
        simulated(tmp_path, scenario(methods=["full"]))


def test_an_interrupted_run_leaves_a_page_of_what_is_finished(tmp_path: Path) -> None:
    class Impatient(LoggedProgress):
        def cell(self, method: str, seed: int, rounds: int) -> None:
            if method == "head":
                raise Interrupted

    with pytest.raises(Interrupted):
        simulate(
            Simulation(scenario(methods=["full", "head"]), tmp_path), Impatient(), engine="local"
        )
    assert list(json.loads((tmp_path / "summary.json").read_text())["methods"]) == ["full"]
    assert "full" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_a_page_shows_a_run_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped(LoggedProgress):
        def round(self, number: int, *_: float) -> None:
            if number == 2:
                raise Interrupted

    monkeypatch.setattr(simulate_module, "_SHOWN_SECONDS", 0.0)
    with pytest.raises(Interrupted):
        simulate(Simulation(scenario(methods=["full"]), tmp_path), Stopped(), engine="local")
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found["running"] == {"method": "full", "seed": 0, "round": 1}
    assert [row["round"] for row in found["methods"]["full"]["history"]] == [0, 1]
    shown = " ".join((tmp_path / "report.html").read_text().split())
    assert "full with seed 0 was tested after round 1 of" in shown
    ended = simulate(
        Simulation(scenario(methods=["full"]), tmp_path), LoggedProgress(), engine="local"
    )
    assert ended["running"] is None
    # Written when the method had ended.
    assert "goes on" not in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("address", ["", "10.0.0.1:6379"])
def test_a_cluster_is_joined_as_it_is(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(
        "flwr.simulation.run_simulation", lambda *_, **options: given.update(options)
    )
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    _run(ServerApp(), 5)
    asked = given["backend_config"]["init_args"].get("num_cpus")
    assert asked == (None if address else 2) and given["num_supernodes"] == 5


def test_a_client_the_scenario_does_not_know_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="partition 3, the scenario has 3 clients"):
        simulated_client._Role.of(instruction(tmp_path), 3, {}).elastic_client()


def test_a_foreseen_failure_travels_in_the_reply(tmp_path: Path) -> None:
    """The server then logs its reason instead of a traceback."""
    made = scenario(methods=["full"], training=SCENARIO["training"] | {"rounds": 1})
    reasons: list[str] = []

    def alter(reply: Message) -> Message:
        reasons.append(str(reply.content.config_records["fitres.metrics"].get(ERROR, "")))
        return reply

    app = simulated_client_app()
    nodes = InProcessGrid(4, lambda node: app, alter)
    run_methods(Simulation(made, tmp_path), nodes, Recorder())
    assert sorted(reasons)[-1].startswith("this node has partition 3")


def test_all_unknown_names_are_told_at_once() -> None:
    made = scenario(
        methods=["one", "two"],
        method={
            "one": {"policy": "elastik", "rule": "al", "codec": "fp8"},
            "two": {
                "policy": "full",
                "importance": "fishr",
                "downlink_codec": "int8",
            },
        },
        target={"method": "one"},
    )
    with pytest.raises(ScenarioError) as refused:
        check_methods(made)
    text = str(refused.value)
    for hint in ("'elastic'", "'all'", "'fp", "'fisher'", "updates only"):
        assert hint in text
    assert text.count("method one") == 3
    assert text.count("method two") == 2
    assert "\n" not in text
    assert isinstance(refused.value, ElasticError)
