"""What a node costs before it trains: seconds from a message to the first batch, and memory."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from fl_elastic.errors import TrainingError
from fl_elastic.fleet.local import LocalFleet
from fl_elastic.fleet.supervisor import children_of
from fl_elastic_simulations.benchmarks.results import Results

__all__ = ["bench_startup"]

_MESSAGE = Path(__file__).with_name("one_message.py")
_REPEATS = 5
_CASES = tuple((how, state) for state in ("fresh", "kept") for how in ("before", "now"))


def bench_startup(results: Results, tell: Callable[[str], None] = print) -> None:
    """Time one message of MobileNetV2 at 64 pixels in processes of their own, one thread each, in turn.

    ``before`` is with torch's compiler and scikit-learn loaded, as importing them the usual way does; ``now``
    without. ``fresh`` is a node's first message, which measures the costs; ``kept`` a later one, with them on disk.
    Figures are medians of five. Then the memory of an idle node: Flower's two processes.
    """
    if not all(f"{how}, {state}" in results.rows for how, state in _CASES):
        with tempfile.TemporaryDirectory(prefix="fl-elastic-") as scratch:
            found = _messages(Path(scratch), tell)
        for case, runs in found.items():
            results.add(case, {key: statistics.median(run[key] for run in runs) for key in runs[0]})
    if "idle node" not in results.rows:
        with LocalFleet(1) as fleet:
            node = fleet.members[fleet.names[0]]
            sizes = [_resident(pid) for pid in _all_below(node.pid)]
        results.add("idle node", {"processes": len(sizes), "resident_bytes": sum(sizes)})


def _messages(scratch: Path, tell: Callable[[str], None]) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {f"{how}, {state}": [] for how, state in _CASES}
    for repeat in range(_REPEATS):
        for how, state in _CASES:
            folder = scratch / how
            if state == "fresh":
                shutil.rmtree(folder, ignore_errors=True)
            found[f"{how}, {state}"].append(_message(folder, how))
        tell(f"{repeat + 1}/{_REPEATS}")
    return found


def _message(state: Path, how: str) -> dict[str, float]:
    done = subprocess.run(
        # By its path: as a module it would bring the whole of this package.
        [sys.executable, "-W", "ignore", str(_MESSAGE), str(state), how],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    if done.returncode:
        raise TrainingError(f"one message failed: {done.stderr.strip().splitlines()[-1:]}")
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _all_below(pid: int) -> list[int]:
    found, waiting = [], [pid]
    while waiting:
        found.append(waiting.pop())
        waiting += children_of(found[-1])
    return found


def _resident(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0
