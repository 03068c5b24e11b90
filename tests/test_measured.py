"""Tables of the documents are made of the committed rows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from documents import DOCUMENTS, ROOT

from fl_elastic.profiling import load_profile
from fl_elastic_simulations.benchmarks.bad_clients import LIES
from fl_elastic_simulations.benchmarks.benchmark import Results, fill
from fl_elastic_simulations.cli.bench import BENCHMARKS, load
from fl_elastic_simulations.engine.choosing import ChoosingCosts

RESULTS = ROOT / "simulations" / "results"
FAULTS = (ROOT / "docs" / "measured" / "real-fleets.md").read_text()


def rows_of(name: str) -> dict[str, dict[str, object]]:
    benchmark = load(name)
    return Results(RESULTS / f"{benchmark.file or name.replace('-', '_')}.json").rows


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_tables_between_marks_are_those_of_the_committed_rows(document: Path) -> None:
    text = document.read_text()
    marks = re.findall(r"^<!-- (\S+) (\S+) -->$", text, flags=re.MULTILINE)
    assert {name for name, _ in marks} <= set(BENCHMARKS)
    for name in {name for name, _ in marks}:
        assert fill(text, load(name), rows_of(name)) == text, f"fl-elastic bench fill {document}"


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_rows_and_a_table_in_a_document(name: str) -> None:
    assert load(name).name == name
    assert rows_of(name)
    assert any(f"<!-- {name} " in page.read_text() for page in DOCUMENTS)
    used = {path.stem for path in RESULTS.glob("*.json")}
    files = {load(each).file or each.replace("-", "_") for each in BENCHMARKS}
    assert used == files | {"demo", "faults"}


COSTS = sorted([*RESULTS.glob("federation/*.json"), *RESULTS.glob("*/*.state")])


@pytest.mark.parametrize("path", COSTS, ids=named)
def test_costs_that_rows_share_can_be_read(path: Path) -> None:
    """Otherwise a new row would measure them anew, without a word, and differ from the rows beside it."""
    if path.stem.endswith("-choosing"):
        assert ChoosingCosts.load(path) != ChoosingCosts()
    else:
        assert load_profile(path).memory_recorded


def test_the_demos_table_is_the_committed_summary() -> None:
    methods = json.loads((RESULTS / "demo.json").read_text())["methods"]
    text, full = (ROOT / "docs" / "quickstart.md").read_text(), methods["full"]
    for name, method in methods.items():
        row = (
            f"| {name} | {100 * method['final_accuracy']:.1f} ± {100 * method['final_accuracy_std']:.1f} "
            f"| {method['simulated_seconds'] / full['simulated_seconds']:.2f} "
            f"| {method['uplink_bytes'] / full['uplink_bytes']:.2f} |"
        )
        assert row in text


def test_faults_in_the_table_are_those_that_were_tried() -> None:
    rows = json.loads((RESULTS / "faults.json").read_text())["rows"]
    assert len(rows) >= 11
    for fault, row in rows.items():
        assert f"| {fault} | {row['lost']} |" in FAULTS


def test_a_robust_rule_that_security_names_stands_each_lie() -> None:
    """Within two points of the same run without a liar, by the same rule."""
    rows = json.loads((RESULTS / "bad_clients.json").read_text())["rows"]

    def accuracy(rule: str, lie: str, liars: int) -> float:
        return float(rows[f"{rule} | {lie} | {liars}"]["accuracy"])

    for name, lie in LIES.items():
        clean = "none"
        if lie.normalise_steps:
            clean = "steps normalised, none"
        if lie.others is not None:
            clean = "first tensor of nobody"
        for liars in () if lie.attack is None else (1, 2):
            robust = [rule for rule in lie.rules if rule != "contributors"]
            assert any(accuracy(r, name, liars) > accuracy(r, clean, 0) - 0.02 for r in robust), (
                name
            )
