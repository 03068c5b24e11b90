"""What a client says beside its update: how training went, or why it did not."""

from __future__ import annotations

import math
from typing import Any

from fl_elastic.errors import ElasticError, StaleModelError, TrainingError
from fl_elastic.flower.wire import ERROR, STALE
from fl_elastic.training import FitReport

__all__ = ["failure", "fit_metrics"]


def failure(error: ElasticError) -> dict[str, Any]:
    """Return what a client says that could not do what it was asked."""
    stale = {STALE: True} if isinstance(error, StaleModelError) else {}
    return {ERROR: str(error), **stale}


def fit_metrics(report: FitReport) -> dict[str, Any]:
    """Return what every reply says about its training; plain Python values, as Flower wants them.

    Raises
    ------
    TrainingError
        If the mean loss is not finite.
    """
    if not math.isfinite(report.loss):
        raise TrainingError(f"the mean loss is {report.loss}")
    return {
        "train-loss": float(report.loss),
        "steps": int(report.steps),
        "requested-steps": int(report.requested_steps),
        "step-seconds": float(report.step_seconds),
        "full-step-seconds": float(report.full_step_seconds),
        "predicted-seconds": float(report.predicted_seconds),
        "trained-groups": int(report.plan.mask.sum()),
        "based-on": report.based_on,
    }
