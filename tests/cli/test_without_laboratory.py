"""The command line of the library alone, as a board has it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fl_elastic import laboratory
from fl_elastic.errors import LaboratoryMissing

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
    assert line.startswith("error: ") and line.endswith("pip install fl-elastic-simulations")


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
    assert "pip install fl-elastic-simulations" in " ".join(ended.stderr.split())


def test_what_it_brings_is_found_by_name() -> None:
    assert laboratory.from_laboratory("scenario_text").__name__ == "scenario_text"
    with pytest.raises(LaboratoryMissing, match="fl-elastic-simulations"):
        laboratory.from_laboratory("nonsense")
