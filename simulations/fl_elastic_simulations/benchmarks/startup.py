"""Measure the costs of a node's process before training: CPU seconds up to the first batch, and memory."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from fl_elastic.errors import TrainingError
from fl_elastic_simulations.benchmarks.benchmark import Benchmark, Request, Row, Rows

__all__ = ["BENCHMARK", "Startup"]

_MESSAGE = Path(__file__).with_name("one_message.py")
_TURNS = 5
_STATES = {"kept": "costs are on disk", "fresh": "first message, which measures the costs"}


class Startup(Benchmark):
    """Time from the start of a node's process to its first batch of MobileNetV2 at 64 pixels, with one thread.

    In each turn a node gets two messages, each in a process of its own. The first measures the costs (``fresh``);
    the second finds them on disk (``kept``).
    """

    name = "startup"

    def cases(self, request: Request, rows: Rows) -> Mapping[str, tuple[Any, ...]]:
        """Return one case for each turn."""
        return {f"turn {turn}": () for turn in range(_TURNS)}

    def run(self) -> Row:
        """Send a node two messages."""
        with tempfile.TemporaryDirectory(prefix="fl-elastic-") as state:
            return {name: _message(Path(state)) for name in ("fresh", "kept")}

    def tables(self, rows: Rows) -> Mapping[str, pd.DataFrame]:
        """Return medians over the turns: CPU seconds to the first batch, with the peak memory in brackets."""
        cells = {}
        for state, title in _STATES.items():
            if rows:
                found = pd.DataFrame([row[state] for row in rows.values()]).median()
                seconds, peak = found["first_batch_cpu_seconds"], found["peak_bytes"]
                cells[title] = f"{seconds:.1f} s ({peak / 1e6:,.0f} MB)"
        return {"message": pd.DataFrame([cells], index=["to the first batch"])}


def _message(state: Path) -> dict[str, float]:
    done = subprocess.run(
        # Run by its path, since importing it as a module would load this whole package.
        [sys.executable, "-W", "ignore", str(_MESSAGE), str(state)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    if done.returncode:
        raise TrainingError(f"one message failed: {done.stderr.strip().splitlines()[-1:]}")
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


BENCHMARK = Startup()
