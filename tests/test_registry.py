"""The registry: names are checked when added, and explained when unknown."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from fl_elastic.errors import RegistryError
from fl_elastic.registry import Registry, closest


@pytest.fixture
def fruits() -> Registry[type]:
    registry: Registry[type] = Registry("fruit")
    for name in ("pear", "apple", "plum_2"):
        registry.register(name)(type(name, (), {}))
    return registry


def test_names_come_in_alphabetical_order(fruits: Registry[type]) -> None:
    assert fruits.names() == ["apple", "pear", "plum_2"]
    assert list(fruits) == fruits.names()


@pytest.mark.parametrize(
    "name", ["", "Apple", "2apple", "apple_", "_apple", "ap ple", "ap-ple", "ä"]
)
def test_names_must_be_lower_snake_case(fruits: Registry[type], name: str) -> None:
    with pytest.raises(RegistryError, match="fruit name"):
        fruits.register(name)
    assert name not in fruits


@pytest.mark.parametrize("name", ["a", "ab", "a1", "apple_pie", "a_1"])
def test_good_names_are_taken(fruits: Registry[type], name: str) -> None:
    fruits.register(name)(int)
    assert fruits.get(name) is int


def test_a_taken_name_is_refused_and_keeps_its_owner(fruits: Registry[type]) -> None:
    owner = fruits.get("pear")
    with pytest.raises(RegistryError, match="already registered"):
        fruits.register("pear")
    assert fruits.get("pear") is owner


def test_an_unknown_name_lists_the_known_and_guesses(fruits: Registry[type]) -> None:
    with pytest.raises(RegistryError) as caught:
        fruits.get("aple")
    assert str(caught.value) == (
        "unknown fruit 'aple' (did you mean 'apple'?): known are apple, pear, plum_2"
    )


def test_a_far_off_name_gets_no_guess() -> None:
    assert closest("zzz", ["apple"]) == ""
    assert closest("appel", ["apple", "pear"]) == " (did you mean 'apple'?)"


def test_modules_register_a_name_when_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "there"):
        (tmp_path / f"plug_{name}.py").write_text(
            f"from plug_base import KINDS\n\n@KINDS.register({name!r})\nclass Plug:\n    pass\n"
        )
    (tmp_path / "plug_base.py").write_text(
        "from fl_elastic.registry import Registry\n"
        "KINDS = Registry('plug', 'tests.plugs', {'here': 'plug_here'})\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    found = EntryPoints([EntryPoint("there", "plug_there", "tests.plugs")])
    monkeypatch.setattr(
        "fl_elastic.registry.entry_points", lambda group: found if group == "tests.plugs" else None
    )
    plugs = importlib.import_module("plug_base").KINDS
    assert plugs.names() == ["here", "there"] and "here" in plugs and "there" in plugs
    assert not {"plug_here", "plug_there"} & set(sys.modules)
    assert plugs.get("here").__module__ == "plug_here" and "plug_there" not in sys.modules
    assert plugs.get("there").__module__ == "plug_there"
    with pytest.raises(RegistryError, match="known are here, there"):
        plugs.get("nowhere")


def test_a_name_that_a_module_will_register_is_taken_already() -> None:
    plugs: Registry[type] = Registry("plug", modules={"mine": "somewhere.else"})
    with pytest.raises(RegistryError, match=r"plug name 'mine' is somewhere\.else's"):

        @plugs.register("mine")
        class Other:
            pass


@pytest.mark.slow
def test_a_name_that_a_folder_of_methods_lists_is_taken_and_loaded_alone_when_asked_for() -> None:
    """Whether the folder came with the library or somebody put it there, as the example's."""
    example = Path(__file__).parents[1] / "examples" / "own_method"
    code = (
        "import sys; from fl_elastic.errors import RegistryError;"
        "import fl_elastic.methods as methods;"
        f"methods.__path__.append({str(example)!r});"
        "from fl_elastic.planning import POLICIES, policies;"
        "assert len(policies()) >= 14 and 'taking_turns' in policies();"
        "own = [m for m in sys.modules if m.startswith('fl_elastic.methods.') and m.count('.') > 2];"
        "assert own == [], own;"
        "POLICIES.make('head')\n"
        "try:\n    POLICIES.register('bsr')(object)\n"
        "except RegistryError as error:\n    assert 'fl_elastic.methods.tokens.policy' in str(error)\n"
        "else:\n    raise AssertionError\n"
        "unasked = {f'fl_elastic.methods.{each}.policy' for each in ('tokens', 'tinytrain')};"
        "assert not unasked & set(sys.modules)\n"
        "made = POLICIES.make('taking_turns');"
        "assert type(made).__module__ == 'fl_elastic.methods.taking_turns.policy';"
        "files = [m for m in sys.modules if m.startswith('fl_elastic.methods.') and m.count('.') > 2];"
        "assert {m.split('.')[2] for m in files} == {'taking_turns'}, files"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
