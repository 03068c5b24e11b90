"""A summary as frozen values, checked once; missing values are ``None`` or empty.

Fields have the names of ``summary.json``.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from numbers import Real
from typing import Annotated, Any

import pydantic

from fl_elastic.errors import ElasticError


def _finite(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError("not a number")
    return float(value) if math.isfinite(value) else None


def _whole(value: object) -> int | None:
    number = _finite(value)
    return None if number is None else round(number)


def _needed(value: object) -> int:
    number = _whole(value)
    if number is None:
        raise ValueError("not a whole number")
    return number


Number = Annotated[float | None, pydantic.PlainValidator(_finite)]
Count = Annotated[int | None, pydantic.PlainValidator(_whole)]
Whole = Annotated[int, pydantic.PlainValidator(_needed)]
Text = Annotated[str, pydantic.PlainValidator(str)]
Shares = tuple[tuple[Number, ...], ...]


class _Part(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="ignore")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        """Remove entries that are None, so that they count as missing."""
        if not isinstance(value, Mapping):
            raise ValueError("not a mapping")
        return {str(key): each for key, each in value.items() if each is not None}


class Point(_Part):
    """The global model after one round of one seed; seconds, bytes and features are totals since the start.

    If tests come at equal intervals of time, ``since`` is the second from which on the tested model was there.
    """

    seed: Whole = 0
    round: Whole
    since: Number = None
    accuracy: Number = None
    simulated_seconds: Number = None
    uplink_bytes: Number = None
    downlink_bytes: Number = None
    features_found: Count = None
    features_computed: Count = None


class Cut(_Part):
    """A position of the fleet's cut in one seed, and since when; the group is empty for no cut."""

    seed: Whole = 0
    simulated_seconds: Number = None
    group: Text = ""


class DeviceClass(_Part):
    """Devices of one kind."""

    device: Text = ""
    label: Text = ""
    count: Count = None
    slowdown: Number = None
    requested_speedup: Number = None
    memory_bytes: Number = None

    @property
    def shown(self) -> str:
        """Name of the class for readers."""
        return self.label or self.device


class DeviceResult(_Part):
    """Requested speed-up of a method on a device class, and its results."""

    requested_speedup: Number = None
    achieved_speedup: Number = None
    peak_bytes: Number = None


class Rejections(_Part):
    """Number of updates that were not merged in one round of one seed for the same reason."""

    seed: Whole = 0
    round: Whole
    reason: Text = ""
    updates: Whole


class Client(_Part):
    """Costs of a client under a method, and accuracy of the last model on its own classes; means over seeds."""

    device: Text = ""
    examples: Number = None
    accuracy: Number = None
    rounds: Number = None
    seconds: Number = None
    uplink_bytes: Number = None


class Method(_Part):
    """Results and costs of one method; ``coverage`` is rounds x groups per device class.

    Features at the fleet's cut are counted in examples: those with stored and those with computed features.
    """

    name: str
    final_accuracy: Number = None
    final_accuracy_std: Number = None
    simulated_seconds: Number = None
    seconds_to_target: Number = None
    uplink_bytes: Number = None
    downlink_bytes: Number = None
    rejected_updates: Whole = 0
    devices: Mapping[str, DeviceResult] = {}
    coverage: Mapping[str, Shares] = {}
    history: tuple[Point, ...] = ()
    cuts: tuple[Cut, ...] = ()
    features_found: Whole = 0
    features_computed: Whole = 0
    clients: tuple[Client, ...] = ()
    worst_client: Number = None
    best_client: Number = None
    tenth_percentile: Number = None
    rejections: tuple[Rejections, ...] = ()

    @pydantic.field_validator("history")
    @classmethod
    def _tested(cls, history: tuple[Point, ...]) -> tuple[Point, ...]:
        return tuple(point for point in history if point.accuracy is not None)


class Running(_Part):
    """The method and seed that were running when the summary was written, and the round of their last test."""

    method: Text
    seed: Whole
    round: Whole


class Results(_Part):
    """A whole simulation: its setting and its methods, the first of which is the reference."""

    title: Text = "Elastic federated training"
    dataset: Text = ""
    model: Text = ""
    clients: Count = None
    rounds: Count = None
    seeds: tuple[Whole, ...] = ()
    # Times are simulated unless the summary says that the clock was real.
    simulated: bool = True
    target_accuracy: Number = None
    target_rule: Text = ""
    environment: Mapping[str, Text] = {}
    devices: tuple[DeviceClass, ...] = ()
    groups: tuple[Text, ...] = ()
    methods: tuple[Method, ...]
    labels: tuple[tuple[Whole, ...], ...] = ()
    scenario: Annotated[
        str, pydantic.PlainValidator(lambda v: json.dumps(v, indent=1) if v else "")
    ] = ""
    command: Text = ""
    largest_class: Number = None
    running: Running | None = None

    @property
    def clock(self) -> str:
        """Name of the times for readers."""
        return "simulated time" if self.simulated else "time"


def read_summary(summary: Mapping[str, object]) -> Results:
    """Check a summary and return it as frozen values.

    Only ``methods`` is required; every other part may be missing. Device classes that only a method names are
    added.

    Parameters
    ----------
    summary : mapping
        Content of the ``summary.json`` that ``fl-elastic simulate`` writes.

    Raises
    ------
    ElasticError
        If there is no method, or a part has a wrong type.
    """
    given = summary.get("methods") if isinstance(summary, Mapping) else None
    if isinstance(summary, Mapping) and not given:
        raise ElasticError("the summary has no methods; give at least one under 'methods'")
    if isinstance(given, Mapping):
        named = [
            {**each, "name": str(name)} if isinstance(each, Mapping) else each
            for name, each in given.items()
        ]
        summary = {**summary, "methods": named}
    try:
        results = Results.model_validate(summary)
    except pydantic.ValidationError as error:
        found = error.errors()[0]
        place = list(found["loc"])
        if isinstance(given, Mapping) and place[:1] == ["methods"]:
            place[1] = list(given)[int(place[1])]
        where = ".".join(map(str, place)) or "the summary"
        raise ElasticError(
            f"{where} is {reprlib.repr(found['input'])}: {found['msg']}; mend the summary and write it again"
        ) from None
    listed = {device.device: device for device in results.devices}
    for method in results.methods:
        for name in (*method.devices, *method.coverage):
            listed.setdefault(name, DeviceClass(device=name))
    return results.model_copy(update={"devices": tuple(listed.values())})
