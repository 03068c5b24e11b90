"""The example of other people's trainers, run as its README says."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from example_copies import copied, ran


@pytest.mark.parametrize("trainer", ["lightning", "accelerate", "transformers"])
def test_a_trainer_trains_by_a_plan_and_only_that_changes(trainer: str, tmp_path: Path) -> None:
    if find_spec(trainer) is None:
        pytest.skip(f"{trainer} is not installed: it comes with the extra dev")
    place = copied("other_trainers", tmp_path)
    said = ran(place, "python", f"with_{trainer}.py")
    steps = int(re.findall(rf"{trainer}: (\d+) steps, trained down to", said)[0])
    assert steps == {"lightning": 64, "accelerate": 16, "transformers": 32}[trainer]
    held, whole = map(int, re.findall(rf"{trainer}: (\d+) of (\d+) tensors", said)[0])
    assert 0 <= held < whole and (place / f"{trainer}.bin").stat().st_size > 100
