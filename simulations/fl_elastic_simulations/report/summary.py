"""A summary as frozen values; missing values are ``None`` or empty.

Fields have the names of ``summary.json``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import pydantic


class _Part(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="ignore")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _known(cls, value: Mapping[str, Any]) -> dict[str, Any]:
        """Remove entries that are None, so that they count as missing."""
        return {key: each for key, each in value.items() if each is not None}


class Point(_Part):
    """The global model after one round of one seed; seconds and bytes are totals since the start.

    If tests come at equal intervals of time, ``since`` is the second from which on the tested model was there.
    """

    seed: int = 0
    round: int
    since: float | None = None
    accuracy: float | None = None
    simulated_seconds: float | None = None
    uplink_bytes: float | None = None


class Cut(_Part):
    """A position of the fleet's cut in one seed, and since when; the group is empty for no cut."""

    seed: int = 0
    simulated_seconds: float | None = None
    group: str = ""


class DeviceClass(_Part):
    """Devices of one kind."""

    device: str = ""
    label: str = ""
    count: int | None = None
    slowdown: float | None = None
    requested_speedup: float | None = None
    memory_bytes: float | None = None

    @property
    def shown(self) -> str:
        """Name of the class for readers."""
        return self.label or self.device


class DeviceResult(_Part):
    """Requested speed-up of a method on a device class, and its results."""

    requested_speedup: float | None = None
    achieved_speedup: float | None = None
    peak_bytes: float | None = None


class Rejections(_Part):
    """Number of updates that were not merged in one round of one seed for the same reason."""

    seed: int = 0
    round: int
    reason: str = ""
    updates: int


class Client(_Part):
    """Costs of a client under a method, and accuracy of the last model on its own classes; means over seeds."""

    device: str = ""
    examples: float | None = None
    accuracy: float | None = None
    rounds: float | None = None
    seconds: float | None = None
    uplink_bytes: float | None = None


class Method(_Part):
    """Results and costs of one method; ``coverage`` is rounds x groups per device class.

    Features at the fleet's cut are counted in examples: those with stored and those with computed features.
    """

    name: str
    final_accuracy: float | None = None
    final_accuracy_std: float | None = None
    simulated_seconds: float | None = None
    seconds_to_target: float | None = None
    uplink_bytes: float | None = None
    downlink_bytes: float | None = None
    rejected_updates: int = 0
    devices: Mapping[str, DeviceResult] = {}
    coverage: Mapping[str, tuple[tuple[float | None, ...], ...]] = {}
    history: tuple[Point, ...] = ()
    cuts: tuple[Cut, ...] = ()
    features_found: int = 0
    features_computed: int = 0
    clients: tuple[Client, ...] = ()
    worst_client: float | None = None
    best_client: float | None = None
    tenth_percentile: float | None = None
    rejections: tuple[Rejections, ...] = ()


class Running(_Part):
    """The method and seed that were running when the summary was written, and the round of their last test."""

    method: str
    seed: int
    round: int


class Results(_Part):
    """A whole simulation: its setting and its methods, the first of which is the reference."""

    title: str = "Elastic federated training"
    dataset: str = ""
    model: str = ""
    clients: int | None = None
    rounds: int | None = None
    seeds: tuple[int, ...] = ()
    # Times are simulated unless the summary says that the clock was real.
    simulated: bool = True
    target_accuracy: float | None = None
    target_rule: str = ""
    environment: Mapping[str, object] = {}
    devices: tuple[DeviceClass, ...] = ()
    groups: tuple[str, ...] = ()
    methods: tuple[Method, ...]
    labels: tuple[tuple[int, ...], ...] = ()
    scenario: Annotated[
        str, pydantic.PlainValidator(lambda v: json.dumps(v, indent=1) if v else "")
    ] = ""
    command: str = ""
    largest_class: float | None = None
    running: Running | None = None

    @property
    def clock(self) -> str:
        """Name of the times for readers."""
        return "simulated time" if self.simulated else "time"


def read_summary(summary: Mapping[str, Any]) -> Results:
    """Return a summary as frozen values; only ``methods`` is required.

    Parameters
    ----------
    summary : mapping
        What `fl_elastic_simulations.engine.summary.summarise` returns.
    """
    named = [{**method, "name": name} for name, method in summary["methods"].items()]
    return Results.model_validate({**summary, "methods": named})
