"""All methods at one budget: which there are, what their tables say, and that cells are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fl_elastic.errors import ElasticError, ProfileError, ScenarioError
from fl_elastic.planning import POLICIES
from fl_elastic_simulations.benchmarks import side_by_side
from fl_elastic_simulations.benchmarks.benchmark import Request, Rows, markdown
from fl_elastic_simulations.benchmarks.one_budget import METHODS
from fl_elastic_simulations.benchmarks.side_by_side import (
    BENCHMARK,
    REFERENCE,
    TASKS,
    own_task,
    side_by_side_cell,
)


def table_of(rows: Rows, name: str) -> list[str]:
    return markdown(BENCHMARK.tables(rows)[name]).splitlines()


OWN = {"model": "digits_cnn", "dataset": "digits"}

# Each beside the one that it is a variant of.
VARIANTS = {"tinytrain_in", "slice_out_fit"}


def test_every_policy_of_the_library_is_compared_somewhere() -> None:
    names = {
        name for name in POLICIES.names() if POLICIES.get(name).__module__.startswith("fl_elastic.")
    }
    compared = {each.policy for each in METHODS.values()}
    assert names - VARIANTS <= compared
    for task in TASKS.values():
        assert set(task.left_out) <= set(METHODS) and REFERENCE in task.methods


def test_a_row_says_what_its_cells_say() -> None:
    rows = {
        f"birds | {REFERENCE} | 0": {"accuracy": 0.5, "seconds": 2.0, "step_bytes": 2.5e6, "uplink_bytes": 1e6},
        f"birds | {REFERENCE} | 1": {"accuracy": 0.7, "seconds": 4.0, "step_bytes": 2.5e6, "uplink_bytes": 1e6},
        "birds | solved head | 1": {"accuracy": 0.6, "seconds": 1.0, "step_bytes": None, "uplink_bytes": None},
        "birds | elastic | 0": {"accuracy": 0.52, "seconds": 3.0, "step_bytes": 5e6, "uplink_bytes": 2e6},
        "birds | elastic | 1": {"accuracy": 0.74, "seconds": 3.0, "step_bytes": 7e6, "uplink_bytes": 2e6},
    }  # fmt: skip
    lines = table_of(rows, "birds")
    assert lines[2:5] == [
        "| solved head | 1 | 60.0 | -10.0 | 1.00 |  |  |",
        f"| {REFERENCE} | 2 | 60.0 |  | 3.00 | 2.5 | 1.0 |",
        # Two pairs: 12.706 times the standard error of 1 point.
        "| elastic | 2 | 63.0 | +3.0 ± 12.7 | 3.00 | 6.0 | 2.0 |",
    ]
    assert sum(line.startswith("Not here: ") for line in lines) == len(
        set(TASKS["birds"].left_out.values())
    )


def test_costs_are_measured_once_beside_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def keep(task: Any, path: Path, root: str) -> None:
        made.append(path.name)
        path.parent.mkdir(exist_ok=True)
        path.touch()

    monkeypatch.setattr(side_by_side, "_keep_costs", keep)
    asked = Request(tmp_path / "table", methods=["full", "bsr"], seeds=[3])
    for _ in range(2):
        assert list(BENCHMARK.cases(asked, {})) == ["birds | full | 3"]
    assert made == ["birds-costs.state"]


@pytest.mark.slow
def test_anybodys_model_and_data_are_a_task(tmp_path: Path) -> None:
    request = Request(
        tmp_path / "mine", methods=["full", REFERENCE, "solved head", "bsr"],
        settings=OWN | {"passes": "1"},
    )  # fmt: skip
    cases = BENCHMARK.cases(request, {})
    rows = {name: BENCHMARK.run(*case, 64) for name, case in cases.items()}
    (title,) = {name.split(" | ")[0] for name in rows}
    assert title.startswith("digits_cnn on digits, 1 passes in batches of 16")
    assert len(list(tmp_path.glob("mine/*-costs.state"))) == 1
    assert "policy 'bsr' drops tokens" in rows[f"{title} | bsr | 0"]["refused"]
    _, _, *lines = table_of(rows, title)
    methods = [line.split(" | ")[0] for line in lines if line.startswith("| ")]
    assert methods == ["| full", "| solved head", f"| {REFERENCE}"]
    assert lines[-1].startswith("Not here: `bsr`: policy 'bsr' drops tokens")
    # 64 examples are four batches of 16.
    assert rows[f"{title} | full | 0"]["steps"] <= 4
    with pytest.raises(ScenarioError, match="a table of its own"):
        BENCHMARK.cases(Request(tmp_path / "side_by_side", settings=OWN), {})


@pytest.mark.parametrize(
    "setting",
    [{"batch_size": 8}, {"passes": 2}, {"rate": 0.1}, {"head_rate": 0.1}, {"image_size": 16}],
)
def test_cells_of_other_settings_are_not_taken_for_its_own(setting: dict[str, Any]) -> None:
    assert own_task(OWN).title != own_task(OWN | setting).title


def test_a_cell_is_refused_in_a_sentence_and_nothing_else_is_hidden(tmp_path: Path) -> None:
    task = own_task(OWN)
    with pytest.raises(ProfileError):
        side_by_side_cell(task, "full", 0, str(tmp_path), tmp_path / "none.json")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"model": "small_cn"}, "small_cnn"),
        ({"dataset": "digit"}, "digits"),
        ({"passes": 0}, "passes: Input should be greater than 0"),
        ({"rate": float("nan")}, "rate: Input should be a finite number"),
        ({"batch_sise": 8}, "batch_sise: Extra inputs are not permitted"),
    ],
)
def test_a_task_that_cannot_be_is_refused_at_once(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ElasticError, match=said):
        own_task(OWN | wrong)


def test_a_batch_is_no_larger_than_the_data(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="give a batch size of at most as many"):
        BENCHMARK.cases(Request(tmp_path / "mine", settings=OWN | {"batch_size": "100000"}), {})
