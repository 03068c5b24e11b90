"""Count the functions and files of fl_elastic that a fit and a round use: ``python paths_taken.py`` prints JSON.

Run it by its path in a process of its own, with the checkout to be examined on Python's path.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import Any


def main() -> None:
    """Trace one fit, and one round of two clients, with known costs; print the counts."""
    import torch
    from flwr.app import ArrayRecord
    from flwr.serverapp.strategy import FedAvg
    from torch import nn

    import fl_elastic
    from fl_elastic import Budget, ElasticTrainer
    from fl_elastic.flower import ElasticClient, PartialUpdates, elastic_client_app
    from fl_elastic.profiling import profile_model
    from fl_elastic_simulations.engine.in_process_grid import InProcessGrid

    root = Path(fl_elastic.__file__).parent

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
        )  # fmt: skip

    data = [(torch.randn(8, 3, 12, 12), torch.randint(0, 4, (8,))) for _ in range(4)]
    loss = nn.functional.cross_entropy

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    profile = profile_model(model(), loss, data[0], optimizer_fn=sgd)
    trainer = ElasticTrainer(model(), loss, sgd, budget=Budget(speedup=1.5), profile=profile)

    def client(context: Any) -> ElasticClient:
        return ElasticClient(
            model(), data, data, budget=Budget(speedup=1.5), optimizer_fn=sgd, profile=profile
        )

    grid = InProcessGrid(2, elastic_client_app(client))

    strategy = PartialUpdates(FedAvg(min_train_nodes=2, min_evaluate_nodes=2))
    acts: dict[str, Callable[[], object]] = {
        "fit": lambda: trainer.fit(data, epochs=1),
        "round": lambda: strategy.start(grid, ArrayRecord(model().state_dict()), num_rounds=1),
    }
    print(json.dumps({name: _walk(root, act) for name, act in acts.items()}))


def _walk(root: Path, act: Callable[[], object]) -> dict[str, int]:
    """Return the number of functions of a package that run, of their files, and of returns to an earlier file."""
    met: dict[CodeType, str] = {}
    inside = f"{root}{os.sep}"

    def look(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        # Code that runs once, at import, does not count.
        if event == "call" and code.co_filename.startswith(inside) and code.co_name != "<module>":
            met.setdefault(code, code.co_filename)

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        act()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    stays = [file for file, _ in groupby(met.values())]
    files = len(set(stays))
    return {"functions": len(met), "files": files, "returns": len(stays) - files}


if __name__ == "__main__":
    main()
