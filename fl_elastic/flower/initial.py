"""What a server begins with: arrays, whether these are pretrained, and settings for unequal devices."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from torch import nn

from fl_elastic.aggregation import (
    SERVER_OPTIMIZERS,
    AggregationRule,
    MergeOptions,
    ModelAverage,
    ServerOptimizer,
)
from fl_elastic.flower.records import as_arrays, as_record
from fl_elastic.flower.round_config import Deadline, RoundConfig
from fl_elastic.update import Manifest, weights_of

# Flower's own logger, which a server app shows.
_LOG = logging.getLogger("flwr")
# Learning rate of the server optimiser that the preset chooses.
_RATE = 1.5


def initial_arrays(model: nn.Module, *, whole: bool = False) -> ArrayRecord:
    """Return the arrays that a server begins with: the trained tensors, and the digest of a frozen base.

    A client with another frozen base refuses to train and says so. For a model without a frozen base these are all
    tensors.

    Parameters
    ----------
    model : nn.Module
        The model as on the devices.
    whole : bool
        Whether to send the frozen base as well, for devices that do not have it.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    >>> _ = model[0].requires_grad_(False)
    >>> list(initial_arrays(model))
    ['1.weight', '1.bias', 'fl_elastic.frozen_base']
    """
    return as_record(weights_of(model, Manifest.of(model, whole=whole)))


def fresh_statistics(weights: Mapping[str, NDArray[Any]], manifest: Manifest) -> list[str]:
    """Return the running statistics that have never seen data: a mean of zeros beside a variance of ones.

    A norm that keeps such statistics does not normalise at all.
    """
    fresh = []
    for name in manifest.names:
        mean, variance = weights[name], weights.get(name.replace("running_mean", "running_var"))
        if name.endswith("running_mean") and variance is not None:
            if not np.any(mean) and np.all(variance == 1):
                fresh.append(name)
    return fresh


def trained_before(arrays: ArrayRecord) -> bool:
    """Return whether a model's norms have been trained: their statistics have seen data, or their scales differ.

    A model without norms counts as untrained.

    >>> trained_before(as_record({"norm.weight": np.ones(3), "norm.bias": np.zeros(3)}))
    False
    >>> trained_before(as_record({"norm.weight": np.array([1.1, 0.9, 1.0])}))
    True
    """
    weights = as_arrays(arrays)
    means = [each for name, each in weights.items() if name.endswith("running_mean")]
    if means:
        return any(np.any(each) for each in means)
    scales = [each for name, each in weights.items() if name.endswith("weight") and each.ndim == 1]
    return any(len(each) > 0 and np.any(each != each[0]) for each in scales)


@dataclass(frozen=True)
class Settings:
    """How updates are merged and what the rounds are like; see `fl_elastic.flower.PartialUpdates`."""

    rule: str | AggregationRule | None = None
    merge: MergeOptions | None = None
    config: RoundConfig | None = None
    server_optimizer: ServerOptimizer | None = None
    average: ModelAverage | None = None


def for_untrained(deadline: Deadline) -> Settings:
    """Return the settings for unequal devices and a model that begins from random weights, and log them."""
    merge, average = MergeOptions(late="merge"), ModelAverage(0.9)
    config = RoundConfig(deadline=deadline)
    _LOG.info(
        "for unequal devices: rule contributors, server optimiser agreement at %g, mean of the last models "
        "at %g, late updates merged by age to the power of -%g, %s",
        _RATE, average.decay, merge.staleness_power, config,
    )  # fmt: skip
    optimizer = SERVER_OPTIMIZERS.make("agreement", _RATE)
    return Settings("contributors", merge, config, optimizer, average)


def for_pretrained(deadline: Deadline) -> Settings:
    """Return the settings for unequal devices and a pretrained model, and log them."""
    config = RoundConfig(deadline=deadline, read="auto", cut="moving")
    _LOG.info("for unequal devices and a pretrained model: rule contributors, %s", config)
    return Settings("contributors", config=config)
