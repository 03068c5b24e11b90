"""A fleet of unequal devices: its table in a scenario file, and its clients."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, cast

from annotated_types import Ge, Gt, Le, Lt

from fl_elastic.errors import ScenarioError
from fl_elastic.settings import Number, Text, Whole, approved, known_among, read_settings
from fl_elastic_simulations.unequal.availability import ALWAYS, Availability, diurnal, read_trace
from fl_elastic_simulations.unequal.devices import Device, catalogue, device, told_apart

Count = Annotated[Whole, Ge(1)]
Positive = Annotated[Number, Gt(0)]
NotNegative = Annotated[Number, Ge(0)]

# Other keys of a scenario's file, from which the fleet alone can be read.
_OF_A_SCENARIO = (
    "title", "seeds", "methods", "method", "data", "model", "training", "deadline", "target",
)  # fmt: skip


@dataclass(frozen=True)
class AvailabilitySection:
    """``availability`` of an entry of a fleet: a trace, or parameters of `availability.diurnal`.

    Parameters
    ----------
    trace : str, optional
        A CSV file (`availability.read_trace`), beside the fleet's file.
    repeat_seconds : float, optional
        Number of seconds after which the trace repeats; by default nobody is there after its end.
    share : float, optional
        Mean share of the time at which a device is there, instead of a trace.
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
        """Return the availability of the client with this number.

        Raises
        ------
        ScenarioError
            If the trace cannot be read or has no line for the client.
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
        """Text that distinguishes devices with this availability from others."""
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
    """``[costs.TYPE]``: costs of messages of a type ("train") on the reference host, instead of measured ones.

    Parameters
    ----------
    seconds : float
        Seconds for each message.
    seconds_per_example : float
        Additional seconds for each example that the reply reports under ``num-examples``.
    peak_bytes : float, optional
        Memory for handling one message; measured by default.
    """

    seconds: NotNegative = 0.0
    seconds_per_example: NotNegative = 0.0
    peak_bytes: NotNegative | None = None


@dataclass(frozen=True)
class FleetSection:
    """``[[fleet]]``: a number of clients on the same kind of device.

    Parameters
    ----------
    name : str, optional
        Name of this class of clients; by default the device's.
    device : str
        A name of the device catalogue.
    count : int
        Number of clients.
    speedup : float
        Factor by which their local training must be faster than a full round.
    uplink_share : float, optional
        Share of a full update that they may send per round.
    memory_bytes : int, optional
        Bytes that training may take on them beyond the weights and inference, as in `fl_elastic.Budget`. By default
        there is no limit, as the catalogue does not know how much a device's system leaves over. A client without a
        budget that cannot train everything is left out of every round; so is one whose peer trained too much.
    availability : AvailabilitySection, optional
        When they can be reached; by default always.
    slowdown, uplink_bytes_per_second, downlink_bytes_per_second : optional
        Figures that replace those of the catalogue.
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
    availability: Annotated[AvailabilitySection | None, approved(_one_source)] = None


@dataclass(frozen=True)
class Client:
    """One client of the federation.

    Parameters
    ----------
    index : int
        Its number, which is also its partition of the data.
    device : Device
        The device on which it runs.
    speedup : float
        Factor by which its local training must be faster than a full round.
    uplink_share : float, optional
        Share of a full update that it may send per round.
    memory_bytes : int, optional
        Bytes that training may take beyond the weights and inference.
    """

    index: int
    device: Device
    speedup: float
    uplink_share: float | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Fleet:
    """Devices by class, from the tables ``[[fleet]]`` and ``[costs]`` of a file.

    Parameters
    ----------
    entries : tuple of FleetSection
        Entries of the fleet, at least one.
    costs : mapping of str to CostSection
        By message type, the costs of messages on the reference host; other types are measured.

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
        """Read a fleet's TOML file, or the fleet of a scenario's file.

        Raises
        ------
        ScenarioError
            If the file cannot be read or is invalid; the message lists all problems.
        """
        path = Path(path)
        table = read_toml(path, "fleet")
        found = {key: value for key, value in table.items() if key not in _OF_A_SCENARIO}
        problems: list[str] = []
        file = read_settings(_File, traces_beside(found, path.parent), problems)
        if file is None:
            raise one_error(path.name, problems)
        return cls(file.fleet, file.costs)

    @cached_property
    def clients(self) -> tuple[Client, ...]:
        """One entry per client, numbered in the order of the table."""
        clients: list[Client] = []
        for entry, hardware in zip(self.entries, self._hardware(), strict=True):
            for _ in range(entry.count):
                clients.append(
                    Client(
                        len(clients), hardware, entry.speedup, entry.uplink_share, entry.memory_bytes
                    )
                )  # fmt: skip
        return tuple(clients)

    @cached_property
    def availabilities(self) -> tuple[Availability, ...]:
        """Availability of each client, read or drawn at the first use."""
        sections = [entry.availability for entry in self.entries for _ in range(entry.count)]
        return tuple(
            ALWAYS if section is None else section.of(index)
            for index, section in enumerate(sections)
        )

    @property
    def always_there(self) -> bool:
        """Whether all clients can be reached at all times."""
        return all(entry.availability is None for entry in self.entries)

    def _hardware(self) -> list[Device]:
        """Return the device of each entry of the fleet; names of equal devices say how they differ."""
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
                    "availability": "always there" if there is None else there.said,
                }
            )
            named = made if entry.name is None else replace(made, name=entry.name, label=entry.name)
            devices.append(named)
        return told_apart(devices, figures)


def read_toml(path: Path, kind: str) -> dict[str, Any]:
    """Return the content of a TOML file of this kind, a scenario or a fleet.

    Raises
    ------
    ScenarioError
        If the file cannot be read or is not TOML; the message names the line.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ScenarioError(f"no {kind} file {path}: check the path") from None
    except OSError as error:
        raise ScenarioError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ScenarioError(f"{path} is not a TOML file: it is not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise ScenarioError(f"{path} is not valid TOML: {error}") from None
    except RecursionError:
        raise ScenarioError(f"{path} is nested too deeply: no {kind} is") from None


def one_error(source: str, problems: Sequence[str]) -> ScenarioError:
    """Return one error for all problems of a file, on one line if there is only one."""
    if len(problems) == 1:
        return ScenarioError(f"{source}: {problems[0]}")
    listed = "\n".join(f"  {problem}" for problem in problems)
    return ScenarioError(f"{source}: {len(problems)} problems\n{listed}")


def _not_empty(fleet: tuple[FleetSection, ...]) -> None:
    if not fleet:
        raise ScenarioError("empty; give at least one [[fleet]] entry with a device")


Entries = Annotated[tuple[FleetSection, ...], approved(_not_empty)]
"""The ``[[fleet]]`` entries of a file."""


@dataclass(frozen=True)
class _File:
    """The allowed content of a fleet's file."""

    fleet: Entries
    costs: Mapping[str, CostSection] = field(default_factory=dict)


def traces_beside(table: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a file's table in which the traces of its fleet are absolute paths in the file's folder."""
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
