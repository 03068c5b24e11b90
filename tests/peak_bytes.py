"""The most bytes of tensors that are there at one time while something runs, by torch's own allocations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], Any], folder: Path) -> int:
    """Return the peak above what was there before; the work space of single operations' libraries is not seen."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    path = folder / "trace.json"
    seen.export_chrome_trace(str(path))
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: float(event["ts"])):
        now += int(event["args"]["Bytes"])
        most = max(most, now)
    return most
