"""The command line of the library alone, as a board has it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from fl_elastic import laboratory
from fl_elastic.errors import LaboratoryMissing

ROOT = Path(__file__).parents[2]
INSTALL = f"python -m pip install {ROOT / 'simulations'}"
KINDS = {".py", ".md", ".sh", ".yml", ".yaml", ".txt", ".service", ".toml"}
ALONE = """
import importlib.metadata as metadata, sys
real = metadata.entry_points
metadata.entry_points = lambda **wanted: (
    metadata.EntryPoints() if wanted.get("group", "").startswith("fl_elastic") else real(**wanted)
)
sys.modules["fl_elastic_simulations"] = None
from fl_elastic.cli import main
sys.argv = ["fl-elastic", *sys.argv[1:]]
main()
"""


def alone(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", ALONE, *arguments], capture_output=True, text=True, timeout=600
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("simulate", "some.toml", "--set", "training.rounds=1"),
        ("bench", "solver", "--fresh"),
        ("fleet", "up", "--local", "1"),
    ],
)
def test_what_only_the_laboratory_can_do_says_in_one_line_what_to_install(
    arguments: tuple[str, ...],
) -> None:
    ended = alone(*arguments)
    assert ended.returncode == 1, ended
    (line,) = ended.stderr.strip().splitlines()
    assert line.startswith("error: ") and line.endswith(INSTALL)


def test_a_broken_package_costs_its_own_command_alone() -> None:
    broken = """metadata.EntryPoints([
        metadata.EntryPoint("odd", "no.such.module:command", "fl_elastic.commands")])"""
    code = ALONE.replace("metadata.EntryPoints()", broken)
    for command, said in (
        ("odd", "no.such.module:command) cannot be loaded"),
        ("nonsense", "No such"),
    ):
        ended = subprocess.run(
            [sys.executable, "-c", code, command], capture_output=True, text=True, timeout=600
        )
        assert ended.returncode != 0 and said in ended.stderr and "Traceback" not in ended.stderr


def test_all_commands_are_named_without_it() -> None:
    ended = alone("--help")
    assert ended.returncode == 0 and "simulate" in ended.stdout and "plan" in ended.stdout


def test_small_models_need_it() -> None:
    ended = alone("plan", "digits_cnn", "--input", "1,8,8")
    assert ended.returncode == 1 and "unknown model 'digits_cnn'" in ended.stderr
    assert INSTALL in " ".join(ended.stderr.split())


def test_what_it_brings_is_found_by_name() -> None:
    assert laboratory.from_laboratory("scenario_text").__name__ == "scenario_text"
    with pytest.raises(
        LaboratoryMissing, match=r"install it with python -m pip install .*/simulations"
    ):
        laboratory.from_laboratory("nonsense")


def test_what_is_advised_to_be_installed_comes_from_where_this_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "a folder"
    (source / "simulations").mkdir(parents=True)
    monkeypatch.setattr(laboratory, "__file__", str(tmp_path / "site-packages/fl_elastic/x.py"))
    told = {"url": source.as_uri(), "dir_info": {}}
    for text, place in (
        (json.dumps(told), f"'{source / 'simulations'}'"),
        (None, "CHECKOUT/simulations, CHECKOUT being the source's folder"),
        ("{", "CHECKOUT/simulations, CHECKOUT being the source's folder"),
    ):
        found = SimpleNamespace(read_text=lambda _, text=text: text)
        monkeypatch.setattr(laboratory, "distribution", lambda _, found=found: found)
        assert laboratory.laboratory_install() == f"python -m pip install {place}"


def test_no_name_that_nobody_owns_is_advised_for_download() -> None:
    """Both names are free in the registry: whoever takes one would run code wherever this is read."""
    advice = re.compile(r"pip install[^\n]*[ '\"]fl[-_]elastic([-_]simulations)?(?![\w/.-])")
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    for folder in (
        "fl_elastic",
        "simulations/fl_elastic_simulations",
        "docs",
        "examples",
        "deploy",
    ):
        files += [each for each in (ROOT / folder).rglob("*") if each.suffix in KINDS]
    assert len(files) > 300
    assert [each for each in files if advice.search(each.read_text("utf-8"))] == []


def test_the_laboratory_asks_for_no_build_of_torch() -> None:
    """torchvision's wheels name one: to install it takes the place of whatever torch is there."""
    project = tomllib.loads((ROOT / "simulations/pyproject.toml").read_text())["project"]
    names = {re.split(r"[\[<>=~ ]", each)[0] for each in project["dependencies"]}
    assert not names & {"torch", "torchvision", "timm"}
    code = ALONE.replace(
        'sys.modules["fl_elastic_simulations"] = None', 'sys.modules["torchvision"] = None'
    )
    code = code.replace('wanted.get("group", "").startswith("fl_elastic")', "False")
    for command in ("init", "simulate", "bench", "prepare"):
        ended = subprocess.run(
            [sys.executable, "-c", code, command, "--help"],
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert ended.returncode == 0, ended.stderr
