"""Elastic federated training: each device trains exactly the part of the model that it can afford."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fl_elastic.budget import Budget
    from fl_elastic.errors import ElasticError
    from fl_elastic.flower.client import ElasticClient
    from fl_elastic.methods.dampening.forget import forget
    from fl_elastic.training import ElasticTrainer, FitReport, TrainerOptions
    from fl_elastic.training.fine_tune import FineTuned, fine_tune

__version__ = "0.1.0"

__all__ = [
    "Budget",
    "ElasticClient",
    "ElasticError",
    "ElasticTrainer",
    "FineTuned",
    "FitReport",
    "TrainerOptions",
    "__version__",
    "fine_tune",
    "forget",
]

_HOMES = {
    "Budget": "fl_elastic.budget",
    "ElasticClient": "fl_elastic.flower.client",
    "ElasticError": "fl_elastic.errors",
    "ElasticTrainer": "fl_elastic.training",
    "FineTuned": "fl_elastic.training.fine_tune",
    "FitReport": "fl_elastic.training",
    "TrainerOptions": "fl_elastic.training",
    "fine_tune": "fl_elastic.training.fine_tune",
    "forget": "fl_elastic.methods.dampening.forget",
}


def __getattr__(name: str) -> Any:
    """Import torch and Flower only when a name that needs them is used.

    Submodules are imported in the same way, so ``fl_elastic.groups`` works after ``import fl_elastic``.
    """
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
