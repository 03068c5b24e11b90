"""What is counted of a checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_elastic.errors import ElasticError, ScenarioError
from fl_elastic_simulations.benchmarks import code_size
from fl_elastic_simulations.benchmarks.benchmark import Request
from fl_elastic_simulations.benchmarks.code_size import BENCHMARK, code_lines, sizes


def test_sizes_of_a_made_up_checkout(tmp_path: Path) -> None:
    (tmp_path / "fl_elastic").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "fl_elastic" / "__init__.py").write_text('"""It is."""\n\n__all__ = ["a", "b"]\n')
    (tmp_path / "fl_elastic" / "one.py").write_text("# Why.\nname = 1\n")
    (tmp_path / "tests" / "test_one.py").write_text("\ndef test_it() -> None:\n    pass\n")
    found = sizes(tmp_path)
    assert (found["library: files"], found["library: lines of code"]) == (2, 2)
    assert found["library: exported names"] == 2 and found["laboratory: files"] == 0
    assert (found["tests: functions"], found["tests: lines of code"]) == (1, 2)
    with pytest.raises(ElasticError, match="holds no folder fl_elastic"):
        sizes(tmp_path / "tests")


def test_strings_that_are_no_docstrings_are_code() -> None:
    assert (
        code_lines('def f():\n    """What."""\n    x = """a\n\n    b"""\n    return x  # so\n') == 5
    )


@pytest.mark.slow
def test_a_checkout_is_walked_and_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = Path(__file__).parents[3]
    monkeypatch.setattr(code_size, "_TURNS", 1)
    row = BENCHMARK.run(checkout)
    assert 5 < row["fit: files"] < row["round: files"] and row["fit: returns"] > 0
    assert row["client: modules"] <= row["message: modules"]
    assert "now" in BENCHMARK.tables({"now": row})["checkouts"]
    with pytest.raises(ScenarioError, match="--set now="):
        BENCHMARK.cases(Request(checkout), {})
