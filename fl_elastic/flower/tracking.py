"""Log the numbers of each round to TensorBoard, MLflow, Weights & Biases, or any other tracker."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from fl_elastic.errors import SettingError
from fl_elastic.flower.round import RoundRecord

_ODD_FOR_MLFLOW = re.compile(r"[^\w\-. /:]")
Log = Callable[[Mapping[str, float], int], object]


class RoundMetrics:
    """Passes the numbers of each round to a function that logs them; give it to a strategy as ``on_round``.

    It logs each round that trains, and the clients' test results if there are any.

    Parameters
    ----------
    log : callable
        ``log(metrics, round)`` with numbers by name, such as ``train/loss`` and ``evaluate/accuracy``.

    Examples
    --------
    >>> seen = []
    >>> metrics = RoundMetrics(lambda numbers, number: seen.append((number, sorted(numbers))))
    >>> metrics.evaluated(3, {"accuracy": 0.5})
    >>> seen
    [(3, ['evaluate/accuracy'])]
    """

    def __init__(self, log: Log) -> None:
        self.log = log

    def __call__(self, record: RoundRecord) -> None:
        """Log a round of training."""
        if record.trains:
            self.log(round_metrics(record), record.server_round)

    def evaluated(self, server_round: int, metrics: Mapping[str, Any]) -> None:
        """Log the clients' test results."""
        numbers = {
            f"evaluate/{name}": float(value)
            for name, value in metrics.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        if numbers:
            self.log(numbers, server_round)


def round_metrics(record: RoundRecord) -> dict[str, float]:
    """Return the numbers of a round: clients, bytes, and the clients' metrics as means weighted by examples.

    A metric that some clients lack is averaged over the clients that have it; NAME-clients is their number.
    """
    merged = record.accepted
    found: dict[str, float] = {
        "round/asked": len(record.asked),
        "round/merged": len(merged),
        "round/rejected": len(record.rejected),
        "round/silent": len(record.silent),
        "round/late": sum(each.staleness > 0 for each in merged),
        "round/examples": sum(each.num_examples for each in merged),
        "round/uplink_bytes": sum(each.uplink_bytes for each in merged),
        "round/downlink_bytes": record.downlink_total_bytes,
    }
    if record.deadline is not None:
        found["round/deadline_seconds"] = record.deadline
    for name in sorted({name for each in merged for name in each.metrics}):
        having = [each for each in merged if name in each.metrics]
        weight = sum(each.num_examples for each in having)
        if weight:
            total = sum(each.num_examples * each.metrics[name] for each in having)
            called = f"train/{name.removeprefix('train-')}"
            found[called] = total / weight
            if len(having) < len(merged):
                found[f"{called}-clients"] = len(having)
    return found


def to_tensorboard(folder: str) -> RoundMetrics:
    """Return an ``on_round`` that writes each round into a folder that TensorBoard shows."""
    writer = _needed("torch.utils.tensorboard", "tensorboard").SummaryWriter(folder)

    def log(metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return RoundMetrics(log)


def to_mlflow() -> RoundMetrics:
    """Return an ``on_round`` that logs each round to the active run of MLflow, or to a new one."""
    mlflow = _needed("mlflow", "mlflow-skinny")
    # MLflow refuses a whole call because of one forbidden character.
    return RoundMetrics(
        lambda metrics, step: mlflow.log_metrics(
            {_ODD_FOR_MLFLOW.sub("_", name): value for name, value in metrics.items()}, step=step
        )
    )


def to_wandb(run: Any = None, **settings: Any) -> RoundMetrics:
    """Return an ``on_round`` that logs each round to a given run of Weights & Biases, or to one from ``init``."""
    run = _needed("wandb", "wandb").init(**settings) if run is None else run
    # A round may be logged in two parts, for training and for testing.
    return RoundMetrics(lambda metrics, step: run.log(dict(metrics), step=step))


def _needed(module: str, package: str) -> ModuleType:
    try:
        return import_module(module)
    except ImportError as error:
        raise SettingError(f"{package} is not installed ({error}): pip install {package}") from None
