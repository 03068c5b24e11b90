"""The example of other people's trainers, run as its README says."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from example_copies import copied, ran

STEPS = {"lightning": 64, "accelerate": 16, "transformers": 32}
# What takes longest is importing torch: here once for all of them.
ONE_AFTER_THE_OTHER = (
    "import runpy, sys\nfor script in sys.argv[1:]: runpy.run_path(script, run_name='__main__')"
)


def check(trainer: str, place: Path, said: str) -> None:
    steps = int(re.findall(rf"{trainer}: (\d+) steps, trained down to", said)[0])
    assert steps == STEPS[trainer]
    held, whole = map(int, re.findall(rf"{trainer}: (\d+) of (\d+) tensors", said)[0])
    assert 0 <= held < whole and (place / f"{trainer}.bin").stat().st_size > 100


@pytest.mark.slow
def test_trainers_train_by_a_plan_and_only_that_changes(tmp_path: Path) -> None:
    installed = [trainer for trainer in STEPS if find_spec(trainer) is not None]
    if not installed:
        pytest.skip(f"none of {', '.join(STEPS)} is installed: they come with the extra dev")
    place = copied("other_trainers", tmp_path)
    scripts = [f"with_{trainer}.py" for trainer in installed]
    said = ran(place, "python", "-c", ONE_AFTER_THE_OTHER, *scripts)
    for trainer in installed:
        check(trainer, place, said)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", STEPS)
def test_a_trainer_is_run_as_its_readme_says(trainer: str, tmp_path: Path) -> None:
    pytest.importorskip(trainer)
    place = copied("other_trainers", tmp_path)
    check(trainer, place, ran(place, "python", f"with_{trainer}.py"))
