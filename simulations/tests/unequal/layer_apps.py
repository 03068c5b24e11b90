"""Apps and fleets for tests of the layer around Flower's grid."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fl_elastic_simulations.unequal import Fleet, measuring_mod
from fl_elastic_simulations.unequal.fleet import AvailabilitySection, CostSection, FleetSection

FAST = 1e24
"""Bytes a second, beside which sending takes no time."""


def fleet(
    *slowdowns: float,
    costs: dict[str, CostSection] | None = None,
    bandwidth: float = FAST,
    memory: Sequence[int | None] = (),
    availability: AvailabilitySection | None = None,
) -> Fleet:
    """One device of each slowdown; a message of training takes a second on the host, others none."""
    entries = [
        FleetSection(
            "laptop", slowdown=slowdown, memory_bytes=limit, availability=availability,
            uplink_bytes_per_second=bandwidth, downlink_bytes_per_second=bandwidth,
        )
        for slowdown, limit in zip(slowdowns, memory or [None] * len(slowdowns), strict=True)
    ]  # fmt: skip
    given = {"train": CostSection(seconds=1.0), "evaluate": CostSection()}
    return Fleet(tuple(entries), given if costs is None else costs)


def arrays(*values: float) -> ArrayRecord:
    """A model of one array."""
    return ArrayRecord({"weight": _array(np.array(values, np.float64))})


def _array(value: np.ndarray[Any, Any]) -> Any:
    from flwr.app import Array

    return Array(value)


Heard = Callable[[Message, Context], object]


def app(heard: Heard = lambda *_: None, *, mods: Sequence[Any] = (measuring_mod,)) -> ClientApp:
    """Adds the partition's number to the model; ``heard`` is called with each message."""
    made = ClientApp(mods=list(mods))

    @made.train()
    def train(message: Message, context: Context) -> Message:
        heard(message, context)
        partition = int(context.node_config["partition-id"])
        (record,) = message.content.array_records.values()
        trained = arrays(*(record["weight"].numpy() + partition + 1))
        metrics = MetricRecord({"num-examples": 10 * (partition + 1), "loss": float(partition)})
        return Message(RecordDict({"arrays": trained, "metrics": metrics}), reply_to=message)

    @made.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        heard(message, context)
        metrics = MetricRecord({"num-examples": 10, "accuracy": 0.5})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return made


def busy(seconds: float) -> None:
    """Compute for so much processor time."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        sum(range(1000))
