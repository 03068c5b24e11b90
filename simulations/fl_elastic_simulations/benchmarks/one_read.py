"""Solve one head, or run one fit, in a process of its own, and measure its peak memory.

``python -m fl_elastic_simulations.benchmarks.one_read WHAT`` prints one row as JSON. A peak is the largest resident
set minus the resident set once MobileNetV2 was built. So it includes what torch loads for the first pass.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch

from fl_elastic.budget import Budget
from fl_elastic.groups import Batch
from fl_elastic.losses import classification_loss
from fl_elastic.named_models import resolve_model
from fl_elastic.training import ElasticTrainer, Timing, TrainerOptions
from fl_elastic.training.head_sums import solve_head
from fl_elastic.training.read_out import read_out
from fl_elastic_simulations.benchmarks.steps import sgd
from fl_elastic_simulations.unequal.resident import resident_bytes, set_back_peak

__all__ = ["ACTS", "main", "peak_of_act"]

_CLASSES, _PIXELS, _BATCH, _BATCHES = 50, 128, 8, 80
ACTS = {
    "a pass that ends at block 6, and a head there": "features.6@grid4",
    "the same, with 2,048 features": "features.6@grid8",
    "a pass to the last layer, and a head there": "last",
    "places chosen, a pass, and a head there": "auto",
    "four steps of the head": "head",
    "four steps that train everything": "full",
}
"""Work that can be measured, by its name in the table."""


class _Images:
    """Batches of eight images of noise, made when they are read."""

    def __init__(self, batches: int) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(0)
        for _ in range(self._batches):
            targets = torch.randint(0, _CLASSES, (_BATCH,), generator=generator)
            inputs = torch.randn(_BATCH, 3, _PIXELS, _PIXELS, generator=generator)
            yield inputs, targets


def peak_of_act(act: str, batches: int = _BATCHES) -> dict[str, Any]:
    """Do one kind of work in this process; return the bytes of its peak, and those that were resident before."""
    model = resolve_model("mobilenet_v2", _CLASSES)
    set_back_peak()
    before = resident_bytes("VmRSS")
    if act in ("head", "full"):
        options = TrainerOptions(seed=0, timing=Timing(closed_loop=False))
        trainer = ElasticTrainer(
            model, classification_loss, sgd, budget=Budget(), policy=act, options=options
        )
        trainer.fit(_Images(4))
    elif act == "last":
        solve_head(model, _Images(batches))
    else:
        read_out(model, _Images(batches), read=act)
    return {"peak_bytes": resident_bytes("VmHWM") - before, "resident_bytes": before}


def main() -> None:
    """Print the row of the work that the command-line argument names."""
    torch.set_num_threads(1)
    print(json.dumps(peak_of_act(sys.argv[1])))


if __name__ == "__main__":
    main()
