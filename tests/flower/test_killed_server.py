"""A real server process that is killed at random moments, and started again until it is done."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from scripted_clients import first_arrays
from test_interrupted_everywhere import assert_same_memory

from fl_elastic.flower import load_checkpoint

pytestmark = pytest.mark.slow

SERVER = """
import sys
import time
from pathlib import Path

sys.path[:0] = {paths!r}
import test_interrupted_everywhere as federation

federation.ROUNDS = {rounds}
if {slowly}:
    answer = federation.Crashing._answer

    def slow_answer(self, message):
        time.sleep(0.01)
        return answer(self, message)

    federation.Crashing._answer = slow_answer
federation.life(federation.STRATEGIES["all terms"](), Path(sys.argv[1]), {{}})
"""
ROUNDS = 12


def start(directory: Path, slowly: bool) -> subprocess.Popen[bytes]:
    here = Path(__file__).parent
    script = SERVER.format(paths=[str(here), str(here.parent)], rounds=ROUNDS, slowly=slowly)
    return subprocess.Popen(
        [sys.executable, "-c", script, str(directory)],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def rounds_done(directory: Path) -> int:
    found = sorted(directory.glob("round-*.state"))
    return int(found[-1].stem.removeprefix("round-")) if found else 0


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_three_times_it_ends_at_the_same_model_and_ledger(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("test_interrupted_everywhere.ROUNDS", ROUNDS)
    assert start(tmp_path / "whole", slowly=False).wait(120) == 0
    draw, parts = random.Random(seed), tmp_path / "parts"
    for life in range(3):
        process = start(parts, slowly=True)
        # A few rounds more than before, and then anywhere within a round or its checkpoint.
        until = time.monotonic() + 60
        while rounds_done(parts) <= 3 * life and process.poll() is None:
            assert time.monotonic() < until
            time.sleep(0.005)
        time.sleep(draw.uniform(0.0, 0.2))
        assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        assert process.wait(10) == -signal.SIGKILL
        assert 0 < rounds_done(parts) < ROUNDS
    assert start(parts, slowly=False).wait(120) == 0
    one, other = (load_checkpoint(tmp_path / name, first_arrays()) for name in ("parts", "whole"))
    assert one is not None
    assert other is not None
    assert all(np.array_equal(one.arrays[name], other.arrays[name]) for name in other.arrays)
    assert_same_memory(parts, tmp_path / "whole")
