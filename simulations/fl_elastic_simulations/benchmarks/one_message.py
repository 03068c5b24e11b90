"""Handle one training message in a process of its own, as on a node: ``python one_message.py STATE``.

It prints JSON: CPU and wall-clock seconds from the start of the process to the first trained batch and to the
reply, and resident bytes, both when everything is loaded and at the peak.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["main"]

_PIXELS, _BATCH, _BATCHES, _CLASSES = 64, 8, 6, 50
_KIB = 1024


def main(arguments: list[str]) -> None:
    """Import what a node's process imports, train MobileNetV2 on one message, and print its costs."""
    state = Path(arguments[0])
    from fl_elastic.training.lean_start import without_compiler
    from fl_elastic_simulations.fleet import app  # noqa: F401
    from fl_elastic_simulations.fleet.node import ScenarioNode  # noqa: F401

    without_compiler()
    loaded = _resident()
    metrics = _message(state)
    print(json.dumps(metrics | {"loaded_bytes": loaded, "peak_bytes": _peak()}))


def _message(state: Path) -> dict[str, float]:
    import numpy as np
    import torch
    from torchvision.models import mobilenet_v2

    from fl_elastic.budget import Budget
    from fl_elastic.flower.client import ElasticClient
    from fl_elastic.flower.records import PACKED
    from fl_elastic.update import weights_of
    from fl_elastic.update.model_wire import encode_weights

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = mobilenet_v2(num_classes=_CLASSES)
    batches = _Watched(
        [
            (torch.randn(_BATCH, 3, _PIXELS, _PIXELS), torch.randint(_CLASSES, (_BATCH,)))
            for _ in range(_BATCHES)
        ]
    )
    client = ElasticClient(model, batches, batches, budget=Budget(speedup=2.0), state_dir=state)
    weights = weights_of(model, client.manifest)
    packed = np.frombuffer(encode_weights(weights, client.manifest, version=1), np.uint8)
    _, examples, answer = client.fit([packed], {PACKED: True, "server-round": 1})
    if not examples:
        raise SystemExit(f"nothing was trained: {answer}")
    return {
        "first_batch_cpu_seconds": batches.began[-1][0],
        "first_batch_seconds": batches.began[-1][1],
        "reply_cpu_seconds": _cpu(),
        "reply_seconds": _age(),
    }


class _Watched:
    """A list of batches that records when each iteration begins; the last iteration is the training."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = list(batches)
        self.began: list[tuple[float, float]] = []

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        self.began.append((_cpu(), _age()))
        return iter(self.batches)


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _age() -> float:
    """Return the seconds since this process started."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    import os

    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB


if __name__ == "__main__":
    main(sys.argv[1:])
