"""A summary as frozen values, checked once; what is missing is ``None`` or empty."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TypeVar

from fl_elastic.errors import ElasticError

__all__ = [
    "Client",
    "Cut",
    "DeviceClass",
    "GroupCost",
    "Method",
    "Point",
    "Rejections",
    "Results",
    "Speed",
    "read_summary",
]

T = TypeVar("T")

Shares = tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True)
class Point:
    """The global model after one round of one seed; seconds, bytes and features count from the start."""

    seed: int
    round: int
    accuracy: float
    seconds: float | None
    uplink_bytes: float | None
    downlink_bytes: float | None = None
    features_found: int | None = None
    features_computed: int | None = None


@dataclass(frozen=True)
class Speed:
    """How much faster than a full step a device class was asked to be, and was."""

    requested: float | None
    achieved: float | None


@dataclass(frozen=True)
class Cut:
    """Since when the fleet's cut of one seed lay where; the group is empty for no cut."""

    seed: int
    seconds: float | None
    group: str


@dataclass(frozen=True)
class DeviceClass:
    """Devices of one kind."""

    name: str
    label: str
    count: int | None = None
    slowdown: float | None = None
    requested_speedup: float | None = None
    memory_bytes: float | None = None
    watts: float | None = None


@dataclass(frozen=True)
class Rejections:
    """How many updates were left out of one round of one seed for the same reason."""

    seed: int
    round: int
    reason: str
    updates: int


@dataclass(frozen=True)
class Client:
    """What a client spent under a method, and how good the last model is for its own classes; means over seeds."""

    device: str
    examples: float | None
    accuracy: float | None
    rounds: float | None
    seconds: float | None
    uplink_bytes: float | None


@dataclass(frozen=True)
class GroupCost:
    """What one tensor group costs on the measuring host."""

    name: str
    weights: int | None
    update_seconds: float | None
    path_seconds: float | None


@dataclass(frozen=True)
class Method:
    """What one method reached and spent; ``coverage`` is rounds x groups per device class.

    Features are those at the fleet's cut, of examples that came back and of others. ``importance`` is by group;
    ``peaks``, the bytes of a step, and ``joules`` of a round are by device class.
    """

    name: str
    final_accuracy: float | None
    final_accuracy_std: float | None
    seconds: float | None
    seconds_to_target: float | None
    uplink_bytes: float | None
    downlink_bytes: float | None
    rejected_updates: int
    speeds: Mapping[str, Speed]
    coverage: Mapping[str, Shares]
    history: tuple[Point, ...]
    cuts: tuple[Cut, ...] = ()
    features_found: int = 0
    features_computed: int = 0
    clients: tuple[Client, ...] = ()
    worst_client: float | None = None
    tenth_percentile: float | None = None
    rejections: tuple[Rejections, ...] = ()
    importance: Mapping[str, float | None] = field(default_factory=dict)
    peaks: Mapping[str, float | None] = field(default_factory=dict)
    joules: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Results:
    """A whole simulation: its setting and its methods, the first of which is the reference."""

    title: str
    dataset: str
    model: str
    clients: int | None
    rounds: int | None
    seeds: tuple[int, ...]
    simulated: bool
    target_accuracy: float | None
    target_rule: str
    environment: Mapping[str, str]
    devices: tuple[DeviceClass, ...]
    groups: tuple[str, ...]
    methods: tuple[Method, ...]
    labels: tuple[tuple[int, ...], ...] = ()
    costs: tuple[GroupCost, ...] = ()
    scenario: str = ""
    command: str = ""
    largest_class: float | None = None


def read_summary(summary: Mapping[str, object]) -> Results:
    """Check a summary and return it as frozen values.

    Only ``methods`` must be there; every other part may be missing.

    Parameters
    ----------
    summary : mapping
        What ``fl-elastic simulate`` writes as ``summary.json``.

    Raises
    ------
    ElasticError
        If there is no method, or a part has another type than it must have.
    """
    root = _mapping(summary, "the summary")
    methods = tuple(
        _method(str(name), value)
        for name, value in _mapping(root.get("methods"), "methods").items()
    )
    if not methods:
        raise ElasticError("the summary has no methods; give at least one under 'methods'")
    return Results(
        title=_text(root.get("title")) or "Elastic federated training",
        dataset=_text(root.get("dataset")),
        model=_text(root.get("model")),
        clients=_count(root.get("clients"), "clients"),
        rounds=_count(root.get("rounds"), "rounds"),
        seeds=_each(root.get("seeds"), "seeds", _index),
        # Whoever does not say that the clock was real has computed the times.
        simulated=root.get("simulated") is not False,
        target_accuracy=_number(root.get("target_accuracy"), "target_accuracy"),
        target_rule=_text(root.get("target_rule")),
        environment={
            str(key): _text(value)
            for key, value in _mapping(root.get("environment"), "environment").items()
        },
        devices=_devices(root.get("devices"), methods),
        groups=_each(root.get("groups"), "groups", lambda value, where: _text(value)),
        methods=methods,
        labels=_each(root.get("labels"), "labels", lambda row, where: _each(row, where, _index)),
        costs=_each(root.get("group_costs"), "group_costs", _cost),
        scenario=json.dumps(root["scenario"], indent=1) if root.get("scenario") else "",
        command=_text(root.get("command")),
        largest_class=_number(root.get("largest_class"), "largest_class"),
    )


def _cost(value: object, where: str) -> GroupCost:
    entry = _mapping(value, where)
    return GroupCost(
        name=_text(entry.get("group")),
        weights=_count(entry.get("weights"), f"{where}.weights"),
        update_seconds=_number(entry.get("update_seconds"), f"{where}.update_seconds"),
        path_seconds=_number(entry.get("path_seconds"), f"{where}.path_seconds"),
    )


def _client(value: object, where: str) -> Client:
    entry = _mapping(value, where)

    def number(key: str) -> float | None:
        return _number(entry.get(key), f"{where}.{key}")

    return Client(
        device=_text(entry.get("device")),
        examples=number("examples"),
        accuracy=number("accuracy"),
        rounds=number("rounds"),
        seconds=number("seconds"),
        uplink_bytes=number("uplink_bytes"),
    )


def _devices(value: object, methods: Sequence[Method]) -> tuple[DeviceClass, ...]:
    """Return the listed device classes, then those which only a method names."""
    listed = {device.name: device for device in _each(value, "devices", _device)}
    for method in methods:
        for name in (*method.speeds, *method.coverage):
            listed.setdefault(name, DeviceClass(name, name))
    return tuple(listed.values())


def _device(value: object, where: str) -> DeviceClass:
    entry = _mapping(value, where)
    name = _text(entry.get("device"))
    return DeviceClass(
        name=name,
        label=_text(entry.get("label")) or name,
        count=_count(entry.get("count"), f"{where}.count"),
        slowdown=_number(entry.get("slowdown"), f"{where}.slowdown"),
        requested_speedup=_number(entry.get("requested_speedup"), f"{where}.requested_speedup"),
        memory_bytes=_number(entry.get("memory_bytes"), f"{where}.memory_bytes"),
        watts=_number(entry.get("watts"), f"{where}.watts"),
    )


def _method(name: str, value: object) -> Method:
    where = f"methods.{name}"
    entry = _mapping(value, where)

    def number(key: str) -> float | None:
        return _number(entry.get(key), f"{where}.{key}")

    points = _each(entry.get("history"), f"{where}.history", _point)
    return Method(
        name=name,
        final_accuracy=number("final_accuracy"),
        final_accuracy_std=number("final_accuracy_std"),
        seconds=number("simulated_seconds"),
        seconds_to_target=number("seconds_to_target"),
        uplink_bytes=number("uplink_bytes"),
        downlink_bytes=number("downlink_bytes"),
        rejected_updates=_count(entry.get("rejected_updates"), f"{where}.rejected_updates") or 0,
        speeds=_by_name(entry.get("devices"), f"{where}.devices", _speed),
        coverage=_by_name(entry.get("coverage"), f"{where}.coverage", _shares),
        history=tuple(point for point in points if point is not None),
        cuts=_each(entry.get("cuts"), f"{where}.cuts", _cut),
        features_found=_count(entry.get("features_found"), f"{where}.features_found") or 0,
        features_computed=_count(entry.get("features_computed"), f"{where}.features_computed") or 0,
        clients=_each(entry.get("clients"), f"{where}.clients", _client),
        worst_client=number("worst_client"),
        tenth_percentile=number("tenth_percentile"),
        rejections=_each(entry.get("rejections"), f"{where}.rejections", _rejections),
        importance=_by_name(entry.get("importance"), f"{where}.importance", _number),
        peaks=_by_name(entry.get("devices"), f"{where}.devices", _of_device("peak_bytes")),
        joules=_by_name(entry.get("devices"), f"{where}.devices", _of_device("joules_per_round")),
    )


def _rejections(value: object, where: str) -> Rejections:
    entry = _mapping(value, where)
    return Rejections(
        seed=_index(entry.get("seed", 0), f"{where}.seed"),
        round=_index(entry.get("round"), f"{where}.round"),
        reason=_text(entry.get("reason")),
        updates=_index(entry.get("updates"), f"{where}.updates"),
    )


def _of_device(key: str) -> Callable[[object, str], float | None]:
    """Return what reads a number out of the entry of a device class."""
    return lambda value, where: _number(_mapping(value, where).get(key), f"{where}.{key}")


def _cut(value: object, where: str) -> Cut:
    entry = _mapping(value, where)
    return Cut(
        seed=_index(entry.get("seed", 0), f"{where}.seed"),
        seconds=_number(entry.get("simulated_seconds"), f"{where}.simulated_seconds"),
        group=_text(entry.get("group")),
    )


def _point(value: object, where: str) -> Point | None:
    """Return one point of the history, or nothing for a round that was not evaluated."""
    entry = _mapping(value, where)
    accuracy = _number(entry.get("accuracy"), f"{where}.accuracy")
    if accuracy is None:
        return None
    return Point(
        seed=_index(entry.get("seed", 0), f"{where}.seed"),
        round=_index(entry.get("round"), f"{where}.round"),
        accuracy=accuracy,
        seconds=_number(entry.get("simulated_seconds"), f"{where}.simulated_seconds"),
        uplink_bytes=_number(entry.get("uplink_bytes"), f"{where}.uplink_bytes"),
        downlink_bytes=_number(entry.get("downlink_bytes"), f"{where}.downlink_bytes"),
        features_found=_count(entry.get("features_found"), f"{where}.features_found"),
        features_computed=_count(entry.get("features_computed"), f"{where}.features_computed"),
    )


def _speed(value: object, where: str) -> Speed:
    entry = _mapping(value, where)
    return Speed(
        requested=_number(entry.get("requested_speedup"), f"{where}.requested_speedup"),
        achieved=_number(entry.get("achieved_speedup"), f"{where}.achieved_speedup"),
    )


def _shares(value: object, where: str) -> Shares:
    return _each(value, where, lambda row, place: _each(row, place, _number))


def _by_name(value: object, where: str, read: Callable[[object, str], T]) -> Mapping[str, T]:
    return {
        str(name): read(entry, f"{where}.{name}") for name, entry in _mapping(value, where).items()
    }


def _each(value: object, where: str, read: Callable[[object, str], T]) -> tuple[T, ...]:
    if value is None:
        return ()
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise _unexpected(where, value, "a list")
    return tuple(read(entry, f"{where}[{index}]") for index, entry in enumerate(value))


def _mapping(value: object, where: str) -> Mapping[object, object]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _unexpected(where, value, "a mapping")
    return value


def _number(value: object, where: str) -> float | None:
    """Return a finite number; nothing for a missing, infinite or undefined one."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _unexpected(where, value, "a number")
    number = float(value)
    return number if math.isfinite(number) else None


def _count(value: object, where: str) -> int | None:
    number = _number(value, where)
    return None if number is None else round(number)


def _index(value: object, where: str) -> int:
    count = _count(value, where)
    if count is None:
        raise _unexpected(where, value, "a whole number")
    return count


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _unexpected(where: str, value: object, expected: str) -> ElasticError:
    seen = repr(value)
    seen = seen if len(seen) <= 60 else f"{seen[:60]}..."
    return ElasticError(f"{where} is {seen}, not {expected}; mend the summary and write it again")
