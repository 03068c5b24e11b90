"""What is counted of a checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_elastic.errors import ElasticError
from fl_elastic_simulations.benchmarks import house


def test_sizes_importers_and_names_of_a_made_up_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {
        "__init__": '__all__ = ["a", "b"]\n',
        "one": "from fl_elastic import two\n",
        "two": "from fl_elastic.three import name\n",
        "three": "name = 1\n",
        "four": "import fl_elastic.three\n",
    }.items():
        (tmp_path / "fl_elastic").mkdir(exist_ok=True)
        (tmp_path / "fl_elastic" / f"{name}.py").write_text(text)
    monkeypatch.setattr(house, "_loaded", lambda checkout, choices: {"modules": len(choices)})
    monkeypatch.setattr(house, "_run", lambda checkout, command: '{"plan": 3}')
    monkeypatch.setattr(house, "_wheel_bytes", lambda checkout: 9)
    found = house.look_at(tmp_path)
    assert (found["library_files"], found["library_lines"]) == (5, 5)
    # Two is imported by one alone, three by two and four.
    assert found["library_one_importer"] == 1 and found["library_public_names"] == 2
    assert found["laboratory_files"] == 0
    assert (found["plan_files"], found["wheel_bytes"]) == (3, 9)


def test_another_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ElasticError, match="holds no folder fl_elastic"):
        house.look_at(tmp_path)
