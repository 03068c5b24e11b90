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
    monkeypatch.setattr(
        house, "loaded", lambda checkouts, choices: {"made up": {"modules": len(choices)}}
    )
    monkeypatch.setattr(house, "_run", lambda checkout, command: '{"plan": 3}')
    monkeypatch.setattr(house, "_wheel_bytes", lambda checkout: 9)
    found = house.look_at({"made up": tmp_path})["made up"]
    assert (found["library_files"], found["library_lines"]) == (5, 5)
    # Two is imported by one alone, three by two and four.
    assert found["library_one_importer"] == 1 and found["library_public_names"] == 2
    assert found["laboratory_files"] == 0
    assert (found["plan_files"], found["wheel_bytes"]) == (3, 9)
    assert found["client_modules"] == 1 and found["message_modules"] == 2


def test_checkouts_are_loaded_in_turns_each_by_the_first_import_that_it_can_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []

    def run(checkout: Path, command: list[str]) -> str:
        if checkout.name == "old" and "new_name" in command[-1]:
            raise ElasticError("no module of that name")
        done.append(checkout.name)
        return json.dumps({"modules": 3, "cpu_seconds": float(len(done))})

    monkeypatch.setattr(house, "_run", run)
    checkouts = {"before": Path("old"), "now": Path("new")}
    found = house.loaded(checkouts, ("import new_name", "import old_name"), turns=3)
    assert done == ["old", "new"] * 3
    assert found["before"] == {"modules": 3, "cpu_seconds": 3.0}
    assert found["now"] == {"modules": 3, "cpu_seconds": 4.0}
    with pytest.raises(ElasticError, match="none of import new_name can be done"):
        house.loaded(checkouts, ("import new_name",))


def test_another_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ElasticError, match="holds no folder fl_elastic"):
        house.look_at({"now": tmp_path})


CHECKOUT = Path(__file__).parents[3]
COMMITTED = json.loads((CHECKOUT / "simulations" / "results" / "house.json").read_text())["rows"]


@pytest.mark.parametrize("what", ["library_one_importer", "library_public_names"])
def test_the_house_does_not_grow_in_silence(what: str) -> None:
    """Whoever makes it larger says so, by the row of `fl-elastic bench house`."""
    assert house.sizes(CHECKOUT)[what] <= COMMITTED["now"][what]


@pytest.mark.parametrize("who", house.LOADED)
def test_a_message_does_not_load_more_in_silence(who: str) -> None:
    found = house.loaded({"now": CHECKOUT}, house.LOADED[who], turns=1)["now"]
    assert found["modules"] <= COMMITTED["now"][f"{who}_modules"]
