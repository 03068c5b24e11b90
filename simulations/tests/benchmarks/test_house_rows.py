"""What is counted of a checkout."""

from __future__ import annotations

import json
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
    monkeypatch.setattr(house, "loaded", lambda checkout, choices: {"modules": len(choices)})
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


CHECKOUT = Path(__file__).parents[3]
COMMITTED = json.loads((CHECKOUT / "simulations" / "results" / "house.json").read_text())["rows"]


@pytest.mark.parametrize("what", ["library_one_importer", "library_public_names"])
def test_the_house_does_not_grow_in_silence(what: str) -> None:
    """Whoever makes it larger says so, by the row of `fl-elastic bench house`."""
    assert house.sizes(CHECKOUT)[what] <= COMMITTED["now"][what]


@pytest.mark.parametrize("who", house.LOADED)
def test_a_message_does_not_load_more_in_silence(who: str) -> None:
    found = house.loaded(CHECKOUT, house.LOADED[who], times=1)
    assert found["modules"] <= COMMITTED["now"][f"{who}_modules"]
