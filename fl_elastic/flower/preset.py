"""The preset for unequal devices: settings for a pretrained model, and for one with random weights."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from fl_elastic.aggregation import (
    SERVER_OPTIMIZERS,
    AggregationRule,
    MergeOptions,
    ModelAverage,
    ServerOptimizer,
)
from fl_elastic.flower.round_config import Deadline, RoundConfig

# Flower's own logger, which a server app shows.
_LOG = logging.getLogger("flwr")
# Learning rate of the server optimiser that the preset chooses.
_RATE = 1.5


@dataclass(frozen=True)
class Settings:
    """Settings of `fl_elastic.flower.PartialUpdates` that a preset chooses."""

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
