"""All methods at one budget: which there are, what their tables say, and that cells are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_elastic.errors import ElasticError, ProfileError, ScenarioError
from fl_elastic.planning import POLICIES
from fl_elastic_simulations.benchmarks import side_by_side
from fl_elastic_simulations.benchmarks.one_budget import METHODS
from fl_elastic_simulations.benchmarks.results import Results
from fl_elastic_simulations.benchmarks.side_by_side import (
    BASE,
    REFERENCE,
    bench_side_by_side,
    costs_file,
    side_by_side_cell,
    side_by_side_filled,
    side_by_side_markdown,
)
from fl_elastic_simulations.benchmarks.side_by_side_tasks import TASKS, own_task

# Each beside the one that it is a variant of.
VARIANTS = {f"tinytrain_{name}" for name in ("in", "no_depthwise", "knapsack", "random")}
VARIANTS |= {"slice_out_fit"}


def cell(accuracies: list[float], seconds: float, **more: Any) -> dict[str, Any]:
    row = {"accuracy": float(np.mean(accuracies)), "seconds": seconds, "step_bytes": 2.5e6}
    return {**row, "uplink_bytes": 1e6, "accuracies": accuracies, **more}


def test_every_policy_of_the_library_is_compared_somewhere() -> None:
    names = {
        name for name in POLICIES.names() if POLICIES.get(name).__module__.startswith("fl_elastic.")
    }
    compared = {each.policy for each in METHODS.values()}
    assert names - VARIANTS <= compared
    for task in TASKS.values():
        assert set(task.left_out) <= set(METHODS) and REFERENCE in task.methods
    assert set().union(*(task.methods for task in TASKS.values())) == set(METHODS)


def test_a_row_says_what_its_cells_say() -> None:
    rows = {
        f"vit | {REFERENCE} | 0": {"accuracy": 0.5, "seconds": 2.0, "step_bytes": 2.5e6, "uplink_bytes": 1e6},
        f"vit | {REFERENCE} | 1": {"accuracy": 0.7, "seconds": 4.0, "step_bytes": 2.5e6, "uplink_bytes": 1e6},
        "vit | solved head | 1": {"accuracy": 0.6, "seconds": 1.0, "step_bytes": None, "uplink_bytes": None},
        "vit | elastic | 0": {"accuracy": 0.52, "seconds": 3.0, "step_bytes": 5e6, "uplink_bytes": 2e6},
        "vit | elastic | 1": {"accuracy": 0.74, "seconds": 3.0, "step_bytes": 7e6, "uplink_bytes": 2e6},
    }  # fmt: skip
    lines = side_by_side_markdown(rows, "vit")
    assert lines[2:5] == [
        "| solved head | 1 | 60.0 | -10.0 | 1.00 |  |  |",
        f"| {REFERENCE} | 2 | 60.0 |  | 3.00 | 2.5 | 1.0 |",
        # Two pairs: 12.706 times the standard error of 1 point.
        "| elastic | 2 | 63.0 | +3.0 ± 12.7 | 3.00 | 6.0 | 2.0 |",
    ]
    assert sum(line.startswith("Not here: ") for line in lines) == len(
        set(TASKS["vit"].left_out.values())
    )


def test_episodes_are_paired_one_by_one() -> None:
    rows = {
        f"signs | {REFERENCE} | 0": cell([0.5, 0.6], 1.0),
        f"signs | {REFERENCE} | 1": cell([0.2], 1.0),
        "signs | full | 0": cell([0.6, 0.5], 2.0),
        # Whose episodes the reference lacks.
        "signs | full | 2": cell([0.9], 2.0),
    }
    _, _, full, reference, *_ = side_by_side_markdown(rows, "signs")
    assert full.startswith("| full | 3 | 66.7 | +0.0 ± 127.1 | 2.00 |")
    assert reference.startswith(f"| {REFERENCE} | 3 | 43.3 |  | 1.00 |")


def test_a_table_stands_between_its_marks_alone() -> None:
    text = "a\n<!-- side-by-side birds -->\nold\n<!-- end -->\nb\n<!-- end -->"
    assert side_by_side_filled(text, {}) == text.replace(
        "old", "No cell of this table is measured yet."
    )


def test_cells_are_run_apart_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    known = {id(task): name for name, task in TASKS.items()}

    def finished(run: Any, cells: dict[str, tuple[Any, ...]], workers: int) -> Any:
        del run, workers
        for name, arguments in cells.items():
            task, *others = arguments[:3]
            asked.append((known[id(task)], *others))
            yield name, cell([0.5], 1.0)

    monkeypatch.setattr("fl_elastic_simulations.benchmarks.cells.finished_cells", finished)
    monkeypatch.setattr(side_by_side, "_keep_costs", lambda *_: None)
    monkeypatch.setattr(side_by_side, "of_images", lambda *_, **__: None)
    made: list[Path] = []

    def pretrain(recipe: Any, lessons: Any, path: Path) -> dict[str, Any]:
        del recipe, lessons
        path.parent.mkdir(exist_ok=True)
        path.touch()
        made.append(path)
        return {"accuracy": 0.5}

    monkeypatch.setattr(side_by_side, "pretraining", pretrain)
    results = Results(tmp_path / "table.json")

    def run(**said: Any) -> None:
        bench_side_by_side(results, tmp_path, tell=lambda _: None, **said)

    run(tasks=["birds"], methods=["full", "bsr"], seeds=[3])
    assert asked == [("birds", "full", 3)] and not made
    run(tasks=["birds", "vit"], methods=["full", "bsr"], seeds=[3, 4])
    assert asked[1:] == [
        ("vit", "full", 3), ("vit", "bsr", 3), ("birds", "full", 4), ("vit", "full", 4), ("vit", "bsr", 4),
    ]  # fmt: skip
    run(tasks=["vit"], methods=["full"], seeds=[3])
    assert len(made) == 1 and made[0].is_relative_to(tmp_path) and BASE in results.rows
    with pytest.raises(ScenarioError, match="unknown method 'ful'"):
        run(methods=["ful"])


def test_anybodys_model_and_data_are_a_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def here(run: Any, cells: dict[str, tuple[Any, ...]], workers: int) -> Any:
        del workers
        for name, (task, method, seed, root, costs) in cells.items():
            yield name, run(task, method, seed, root, costs, 64)

    monkeypatch.setattr("fl_elastic_simulations.benchmarks.cells.finished_cells", here)
    task = own_task("digits_cnn", "digits", passes=1)
    results, heard = Results(tmp_path / "mine.json"), list[str]()
    bench_side_by_side(
        results, tmp_path, methods=["full", REFERENCE, "solved head", "bsr"],
        tell=heard.append, among={task.title: task},
    )  # fmt: skip
    assert task.title.startswith("digits_cnn on digits, 1 passes in batches of 16")
    assert set(results.rows) == {
        f"{task.title} | {method} | 0" for method in ("full", REFERENCE, "solved head", "bsr")
    }
    assert costs_file(tmp_path / "mine", task.title).exists()
    assert "policy 'bsr' leaves tokens" in results.rows[f"{task.title} | bsr | 0"]["refused"]
    assert sum("0 of its blocks were found" in each for each in heard) == 1
    _, _, *lines = side_by_side_markdown(results.rows, task.title, task)
    methods = [line.split(" | ")[0] for line in lines if line.startswith("| ")]
    assert methods == ["| full", "| solved head", f"| {REFERENCE}"]
    assert lines[-1].startswith("Not here: `bsr`: policy 'bsr' leaves tokens")
    # 64 examples are four batches of 16.
    assert results.rows[f"{task.title} | full | 0"]["steps"] <= 4


@pytest.mark.parametrize(
    "setting",
    [{"batch_size": 8}, {"passes": 2}, {"rate": 0.1}, {"head_rate": 0.1}, {"image_size": 16}],
)
def test_cells_and_costs_of_other_settings_are_not_taken_for_its_own(
    setting: dict[str, Any], tmp_path: Path
) -> None:
    one, other = own_task("digits_cnn", "digits"), own_task("digits_cnn", "digits", **setting)
    assert one.title != other.title
    assert costs_file(tmp_path, one.title) != costs_file(tmp_path, other.title)


def test_a_cell_is_refused_in_a_sentence_and_nothing_else_is_hidden(tmp_path: Path) -> None:
    task = own_task("digits_cnn", "digits", passes=1)
    with pytest.raises(ProfileError):
        side_by_side_cell(task, "full", 0, str(tmp_path), str(tmp_path / "none.json"))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"model": "small_cn"}, "small_cnn"),
        ({"dataset": "digit"}, "digits"),
        ({"passes": 0}, "passes 0"),
        ({"rate": float("nan")}, "rate nan"),
        ({"batch_size": -1}, "batch size -1"),
    ],
)
def test_a_task_that_cannot_be_is_refused_at_once(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ElasticError, match=said):
        own_task(**{"model": "small_cnn", "dataset": "digits"} | wrong)


def test_a_batch_is_no_larger_than_the_data(tmp_path: Path) -> None:
    task = own_task("digits_cnn", "digits", batch_size=100_000)
    with pytest.raises(ScenarioError, match="give a batch size of at most as many"):
        bench_side_by_side(
            Results(tmp_path / "mine.json"), tmp_path, tell=lambda _: None, among={"mine": task}
        )
