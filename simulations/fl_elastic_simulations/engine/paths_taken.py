"""Through how many files of fl_elastic a plan, a fit and a reply run: ``python paths_taken.py`` prints JSON.

Run by its path in a process of its own, with the checkout that is looked at first on Python's path; it works on
checkouts from before the laboratory stood apart.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["main"]


def main() -> None:
    """Trace one plan, one fit and one round of two clients, each with its costs known.

    A reply takes what a round without evaluation takes besides a fit: the terms and the model on their way to the
    client, and the update from there into the merged model.
    """
    import torch
    from flwr.app import ArrayRecord
    from flwr.serverapp.strategy import FedAvg
    from torch import nn

    import fl_elastic
    from fl_elastic import Budget, ElasticTrainer
    from fl_elastic.flower import ElasticClient, PartialUpdates, elastic_client_app
    from fl_elastic.planning import PlanRequest
    from fl_elastic.profiling import profile_model

    try:
        from fl_elastic_simulations.engine.in_process_grid import InProcessGrid
    except ImportError:
        from fl_elastic.flower.in_process_grid import InProcessGrid  # type: ignore

    try:
        from fl_elastic.planning import POLICIES

        make_policy = POLICIES.make
    except ImportError:
        from fl_elastic.planning import make_policy  # type: ignore

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
    request = PlanRequest(profile, Budget(speedup=1.5), profile.parameter_bytes)
    trainer = ElasticTrainer(model(), loss, sgd, budget=Budget(speedup=1.5), profile=profile)

    def client(context: Any) -> ElasticClient:
        return ElasticClient(
            model(), data, data, budget=Budget(speedup=1.5), optimizer_fn=sgd, profile=profile
        )

    grid = InProcessGrid(2, elastic_client_app(client))

    def round_of(tested: float) -> Callable[[], object]:
        """Make the server, and return what runs a round of it."""
        strategy = PartialUpdates(
            FedAvg(fraction_evaluate=tested, min_train_nodes=2, min_evaluate_nodes=2)
        )
        return lambda: strategy.start(grid, ArrayRecord(model().state_dict()), num_rounds=1)

    plan = _files_of(root, lambda: make_policy("elastic").plan(request))
    fit = _files_of(root, lambda: trainer.fit(data, epochs=1))
    whole = _files_of(root, round_of(tested=1.0))
    trained = _files_of(root, round_of(tested=0.0))
    taken = {"plan": plan, "fit": fit, "round": whole, "reply": trained - fit}
    print(json.dumps({name: len(files) for name, files in taken.items()}))


def _files_of(root: Path, act: Callable[[], object]) -> set[str]:
    """Return the files below a folder of which a function runs."""
    found: set[str] = set()
    inside = f"{root}{os.sep}"

    def look(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(inside):
            # What runs once, when a module is imported, is no step of the way.
            if frame.f_code.co_name != "<module>":
                found.add(frame.f_code.co_filename)

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        act()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


if __name__ == "__main__":
    main()
