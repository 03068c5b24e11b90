"""A fleet of unequal devices: the table of a file, and the clients that it makes."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, cast

from annotated_types import Ge, Gt, Le, Lt

from fl_elastic.errors import ScenarioError
from fl_elastic.settings import Number, Text, Whole, approved, known_among, read_settings
from fl_elastic_simulations.unequal.availability import ALWAYS, Availability, diurnal, read_trace
from fl_elastic_simulations.unequal.devices import Device, catalogue, device, told_apart

__all__ = [
    "AvailabilitySection",
    "Client",
    "CostSection",
    "Entries",
    "Fleet",
    "FleetSection",
    "traces_beside",
]

Count = Annotated[Whole, Ge(1)]
Positive = Annotated[Number, Gt(0)]
NotNegative = Annotated[Number, Ge(0)]

# Of a scenario's file, whose fleet can be read by itself.
_OF_A_SCENARIO = (
    "title", "seeds", "methods", "method", "data", "model", "training", "deadline", "target",
)  # fmt: skip


@dataclass(frozen=True)
class AvailabilitySection:
    """``availability`` of an entry of a fleet: a trace, or what `availability.diurnal` draws by.

    Parameters
    ----------
    trace : str, optional
        A CSV file (`availability.read_trace`), beside the fleet's file.
    repeat_seconds : float, optional
        After so many seconds the trace begins anew; afterwards nobody is there if left out.
    share : float, optional
        In place of a trace, the mean share of its time that a device is there.
    swing, peak_hour, session_seconds, days, seed
        See `availability.diurnal`.
    """

    trace: Text | None = None
    repeat_seconds: Positive | None = None
    share: Annotated[Number, Gt(0), Lt(1)] | None = None
    swing: Annotated[Number, Ge(0), Le(1)] = 0.6
    peak_hour: Annotated[Number, Ge(0), Lt(24)] = 2.0
    session_seconds: Positive = 1800.0
    days: Count = 7
    seed: Annotated[Whole, Ge(0)] = 0

    def of(self, client: int) -> Availability:
        """Return when the client of this number is there.

        Raises
        ------
        ScenarioError
            If the trace cannot be read or does not know the client.
        """
        if self.trace is None:
            return diurnal(
                self.share or 0.0,
                swing=self.swing,
                peak_hour=self.peak_hour,
                session_seconds=self.session_seconds,
                days=self.days,
                seed=(self.seed, client),
            )
        found = read_trace(Path(self.trace), self.repeat_seconds)
        if client not in found:
            raise ScenarioError(
                f"the trace {self.trace} has no line of client {client}, who is in the fleet: add one for each "
                "time that it is there"
            )
        return found[client]

    @property
    def said(self) -> str:
        """What sets devices with it apart from others."""
        if self.trace is not None:
            return f"there as {Path(self.trace).name} says"
        return f"there for {self.share:.10g} of the time"


def _one_source(section: AvailabilitySection | None) -> None:
    if section is None:
        return
    if (section.trace is None) == (section.share is None):
        raise ScenarioError("needs either a trace or a share")
    if section.share is not None and section.share * (1 + section.swing) >= 1:
        raise ScenarioError(
            f"share {section.share} with a swing of {section.swing} is 1 or more at the peak: lower one of them"
        )


@dataclass(frozen=True)
class CostSection:
    """``[costs.TYPE]``: what a message of a type ("train") costs on the reference host, in place of measuring it.

    Parameters
    ----------
    seconds : float
        Of each message.
    seconds_per_example : float
        Besides, for each of the examples that the reply counts under ``num-examples``.
    peak_bytes : float, optional
        What handling one takes of memory; measured if left out.
    """

    seconds: NotNegative = 0.0
    seconds_per_example: NotNegative = 0.0
    peak_bytes: NotNegative | None = None


@dataclass(frozen=True)
class FleetSection:
    """``[[fleet]]``: some clients on the same kind of device.

    Parameters
    ----------
    name : str, optional
        Of this class of clients, where it is not the device's.
    device : str
        A name of the device catalogue.
    count : int
        How many clients.
    speedup : float
        How many times faster than a full round their local training must be.
    uplink_share : float, optional
        Share of a full update that they may send per round.
    memory_bytes : int, optional
        What training may take there beyond the weights and inference, as in `fl_elastic.Budget`; no limit if left
        out, as the catalogue does not know what a device's system leaves over. A client that trains everything
        without a budget, and cannot, is left out of every round; so is one whose peer trained what it cannot.
    watts : float, optional
        What such a device draws while it trains, sends or receives: the report makes joules of it.
    width : float, optional
        Share of the channels of each inner width that peers of narrow models train there (``heterofl``,
        ``fedrolex``, ``random_windows``); the widest that fits the round if left out.
    availability : AvailabilitySection, optional
        When they can be reached; always if left out.
    slowdown, uplink_bytes_per_second, downlink_bytes_per_second : optional
        Replace the figure of the catalogue.
    """

    device: Annotated[Text, known_among("device", catalogue)]
    count: Annotated[Whole, Ge(1), Le(10_000)] = 1
    speedup: Annotated[Number, Ge(1)] = 1.0
    uplink_share: Annotated[Number, Gt(0), Le(1)] | None = None
    slowdown: Positive | None = None
    memory_bytes: Count | None = None
    uplink_bytes_per_second: Positive | None = None
    downlink_bytes_per_second: Positive | None = None
    name: Text | None = None
    watts: Positive | None = None
    width: Annotated[Number, Gt(0), Le(1)] | None = None
    availability: Annotated[AvailabilitySection | None, approved(_one_source)] = None


@dataclass(frozen=True)
class Client:
    """One client of the federation.

    Parameters
    ----------
    index : int
        Its number, which is also its partition of the data.
    device : Device
        What it runs on.
    speedup : float
        How many times faster than a full round its local training must be.
    uplink_share : float, optional
        Share of a full update that it may send per round.
    memory_bytes : int, optional
        What training may take beyond the weights and inference.
    watts : float, optional
        What the device draws while it is busy.
    width : float, optional
        Share of each layer's channels that peers of narrow models train.
    """

    index: int
    device: Device
    speedup: float
    uplink_share: float | None = None
    memory_bytes: int | None = None
    watts: float | None = None
    width: float | None = None


@dataclass(frozen=True)
class Fleet:
    """Devices by class, as the tables ``[[fleet]]`` and ``[costs]`` of a file say.

    Parameters
    ----------
    entries : tuple of FleetSection
        At least one.
    costs : mapping of str to CostSection
        By message type, what messages cost on the reference host; other types are measured.

    Examples
    --------
    >>> fleet = Fleet((FleetSection("pi_5"), FleetSection("pi_4b", count=2)))
    >>> [client.device.name for client in fleet.clients], fleet.always_there
    (['pi_5', 'pi_4b', 'pi_4b'], True)
    """

    entries: tuple[FleetSection, ...]
    costs: Mapping[str, CostSection] = field(default_factory=dict)

    @classmethod
    def load(cls, path: str | Path) -> Fleet:
        """Read a fleet's file in TOML, or the fleet of a scenario's file.

        Raises
        ------
        ScenarioError
            If the file cannot be read; or with a list of everything that is wrong with it.
        """
        path = Path(path)
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ScenarioError(f"the fleet's file {path} cannot be read: {error}") from None
        found = {key: value for key, value in table.items() if key not in _OF_A_SCENARIO}
        problems: list[str] = []
        file = read_settings(_File, traces_beside(found, path.parent), problems)
        if file is None:
            listed = "\n".join(f"  {problem}" for problem in problems)
            raise ScenarioError(f"{path.name}: {len(problems)} problem(s)\n{listed}")
        return cls(file.fleet, file.costs)

    @cached_property
    def clients(self) -> tuple[Client, ...]:
        """One entry per client, numbered in the order of the table."""
        clients: list[Client] = []
        for entry, hardware in zip(self.entries, self._hardware(), strict=True):
            for _ in range(entry.count):
                clients.append(
                    Client(
                        len(clients), hardware, entry.speedup, entry.uplink_share,
                        entry.memory_bytes, entry.watts, entry.width,
                    )
                )  # fmt: skip
        return tuple(clients)

    @cached_property
    def availabilities(self) -> tuple[Availability, ...]:
        """When each client can be reached, read or drawn when it is first asked for."""
        sections = [entry.availability for entry in self.entries for _ in range(entry.count)]
        return tuple(
            ALWAYS if section is None else section.of(index)
            for index, section in enumerate(sections)
        )

    @property
    def always_there(self) -> bool:
        """Whether all of them can be reached at all times."""
        return all(entry.availability is None for entry in self.entries)

    def _hardware(self) -> list[Device]:
        """Return the device of each entry of the fleet; two of one name say what they differ in."""
        devices: list[Device] = []
        figures: list[dict[str, float | str | None]] = []
        for entry in self.entries:
            made = device(
                entry.device,
                slowdown=entry.slowdown,
                uplink_bytes_per_second=entry.uplink_bytes_per_second,
                downlink_bytes_per_second=entry.downlink_bytes_per_second,
            )
            there = entry.availability
            figures.append(
                {
                    "slowdown": made.slowdown,
                    "speed-up": entry.speedup,
                    "memory in bytes": entry.memory_bytes,
                    "uplink share": entry.uplink_share,
                    "uplink in bytes/s": made.uplink_bytes_per_second,
                    "downlink in bytes/s": made.downlink_bytes_per_second,
                    "watts": entry.watts,
                    "width": entry.width,
                    "availability": "always there" if there is None else there.said,
                }
            )
            named = made if entry.name is None else replace(made, name=entry.name, label=entry.name)
            devices.append(named)
        return told_apart(devices, figures)


def _not_empty(fleet: tuple[FleetSection, ...]) -> None:
    if not fleet:
        raise ScenarioError("empty; give at least one [[fleet]] entry with a device")


Entries = Annotated[tuple[FleetSection, ...], approved(_not_empty)]
"""The ``[[fleet]]`` of a file."""


@dataclass(frozen=True)
class _File:
    """What a fleet's file may hold."""

    fleet: Entries
    costs: Mapping[str, CostSection] = field(default_factory=dict)


def traces_beside(table: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a file's table with the traces that its fleet names as paths in its folder."""
    entries = table.get("fleet")
    if not isinstance(entries, Iterable):
        return table
    return {**table, "fleet": [_trace_beside(entry, folder) for entry in entries]}


def _trace_beside(entry: Any, folder: Path) -> Any:
    section = entry.get("availability") if isinstance(entry, dict) else None
    trace = section.get("trace") if isinstance(section, dict) else None
    if not isinstance(trace, str) or not trace:
        return entry
    return {
        **entry,
        "availability": {
            **cast(dict[str, Any], section),
            "trace": str((folder / trace).absolute()),
        },
    }
