"""A scenario: everything that defines one simulated federation, read from a TOML file."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fl_elastic.errors import ScenarioError
from fl_elastic_simulations.data.datasets import DATASETS
from fl_elastic_simulations.scenario.checks import (
    METHOD_NAME,
    SECTIONS,
    Rule,
    check_keys,
    check_table,
    check_value,
    raise_problems,
    read_list,
)
from fl_elastic_simulations.scenario.devices import Device, catalogue, device
from fl_elastic_simulations.scenario.overrides import apply_overrides
from fl_elastic_simulations.scenario.sections import (
    DataSection,
    DeadlineSection,
    FleetSection,
    MethodSection,
    ModelSection,
    TargetSection,
    TrainingSection,
)

__all__ = [
    "Client",
    "DataSection",
    "DeadlineSection",
    "FleetSection",
    "MethodSection",
    "ModelSection",
    "Scenario",
    "TargetSection",
    "TrainingSection",
]


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
    """

    index: int
    device: Device
    speedup: float
    uplink_share: float | None = None


@dataclass(frozen=True)
class Scenario:
    """Everything that defines one simulated federation.

    Parameters
    ----------
    title : str
        Headline of the report.
    seeds : tuple of int
        Each method is run once for each.
    methods : tuple of MethodSection
        In the order in which they run.
    data, model, training, fleet, target, deadline
        The sections of the file; ``target`` is ``None`` where nothing is said about it and no
        method is called ``full``, ``deadline`` where there is none.

    Examples
    --------
    >>> scenario = Scenario.from_json(
    ...     '{"data": {"dataset": "digits"}, "model": {"name": "digits_cnn"},'
    ...     ' "training": {"rounds": 3}, "fleet": [{"device": "pi_5", "count": 2}]}'
    ... )
    >>> [client.device.name for client in scenario.clients]
    ['pi_5', 'pi_5']
    >>> Scenario.from_json(scenario.to_json()) == scenario
    True
    """

    title: str
    seeds: tuple[int, ...]
    methods: tuple[MethodSection, ...]
    data: DataSection
    model: ModelSection
    training: TrainingSection
    fleet: tuple[FleetSection, ...]
    target: TargetSection | None
    deadline: DeadlineSection | None = None

    @classmethod
    def load(cls, path: str | Path, overrides: Iterable[str] = ()) -> Scenario:
        """Read and check a scenario file.

        Parameters
        ----------
        path : path
            The TOML file.
        overrides : iterable of str
            Values to change, as ``"training.rounds=5"`` or ``"methods=full,elastic"``.

        Raises
        ------
        ScenarioError
            If the file cannot be read, with the line number where it is not TOML; or with a list
            of everything that is wrong with it.
        """
        path = Path(path)
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ScenarioError(f"no scenario file {path}: check the path") from None
        except OSError as error:
            raise ScenarioError(f"{path} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ScenarioError(f"{path} is not a TOML file: it is not UTF-8 text") from None
        except tomllib.TOMLDecodeError as error:
            raise ScenarioError(f"{path} is not valid TOML: {error}") from None
        except RecursionError:
            raise ScenarioError(f"{path} is nested too deeply: no scenario is") from None
        problems: list[str] = []
        try:
            changed = apply_overrides(table, overrides, problems)
        except RecursionError:
            raise ScenarioError(f"{path} is nested too deeply: no scenario is") from None
        return cls._checked(changed, path.name, problems)

    @classmethod
    def from_json(cls, text: str) -> Scenario:
        """Read what :meth:`to_json` wrote; it is checked like a file.

        Parameters
        ----------
        text : str
            A JSON object with the keys of a scenario file.

        Raises
        ------
        ScenarioError
            If it is not JSON, or not a scenario.
        """
        try:
            table = json.loads(text)
        except ValueError as error:
            raise ScenarioError(f"the scenario is not valid JSON: {error}") from None
        except RecursionError:
            raise ScenarioError("the scenario is nested too deeply: no scenario is") from None
        if not isinstance(table, dict):
            raise ScenarioError(f"the scenario is not a JSON object but {type(table).__name__}")
        return cls._checked(table, "scenario", [])

    def to_json(self) -> str:
        """Return JSON with the keys of a scenario file and every default spelled out."""
        table = asdict(self)
        detailed = table["methods"]
        table["methods"] = [method.name for method in self.methods]
        table["method"] = {method["name"]: _without(method, "name") for method in detailed}
        return json.dumps(_without_none(table))

    @cached_property
    def clients(self) -> tuple[Client, ...]:
        """The fleet, one entry per client, numbered in the order of the file."""
        clients: list[Client] = []
        for entry in self.fleet:
            hardware = device(
                entry.device,
                slowdown=entry.slowdown,
                memory_bytes=entry.memory_bytes,
                uplink_bytes_per_second=entry.uplink_bytes_per_second,
                downlink_bytes_per_second=entry.downlink_bytes_per_second,
            )
            if entry.name is not None:
                hardware = replace(hardware, name=entry.name, label=entry.name)
            for _ in range(entry.count):
                clients.append(Client(len(clients), hardware, entry.speedup, entry.uplink_share))
        return tuple(clients)

    @classmethod
    def _checked(cls, table: dict[str, Any], source: str, problems: list[str]) -> Scenario:
        known = ["title", "seeds", "methods", *SECTIONS]
        check_keys(table, "", known, problems)
        title = check_value(table.get("title", source), "title", Rule(str, source), problems)
        sections = {
            name: check_table(table.get(name, {}), name, SECTIONS[name], problems)
            for name in ("data", "model", "training")
        }
        seeds = read_list(table, "seeds", int, [0], problems)
        methods = _methods(table, problems)
        fleet = _fleet(table, problems)
        target = _target(table, [method.name for method in methods], problems)
        deadline = _deadline(table, problems)
        _across(sections["data"], fleet, problems)
        if sections["training"]["tests"] and not sections["training"]["simulated_seconds"]:
            problems.append("training.tests: give simulated_seconds, which they are spread over")
        raise_problems(source, problems)
        return cls(
            title=title,
            seeds=tuple(seeds),
            methods=methods,
            data=DataSection(**sections["data"]),
            model=ModelSection(**sections["model"]),
            training=TrainingSection(**sections["training"]),
            fleet=fleet,
            target=target,
            deadline=deadline,
        )


def _methods(table: dict[str, Any], problems: list[str]) -> tuple[MethodSection, ...]:
    """Read the methods to run; without a list of names these are all that have a table."""
    detailed = table.get("method", {})
    if not isinstance(detailed, dict):
        problems.append(f"method: expected tables such as [method.elastic], got {detailed!r}")
        detailed = {}
    names = read_list(table, "methods", str, list(detailed) or ["full", "elastic"], problems)
    sections = {
        name: check_table(detailed.get(name, {}), f"method.{name}", SECTIONS["method"], problems)
        for name in dict.fromkeys([*detailed, *names])
    }
    for name, section in sections.items():
        if not METHOD_NAME.fullmatch(name):
            problems.append(f"methods: {name!r} is not made of letters, digits and . _ - only")
        section["policy"] = section["policy"] or name
        if section["budgeted"] is None:
            section["budgeted"] = section["policy"] != "full"
    return tuple(MethodSection(name, **sections[name]) for name in names)


def _fleet(table: dict[str, Any], problems: list[str]) -> tuple[FleetSection, ...]:
    entries = table.get("fleet", [])
    if not isinstance(entries, list) or not entries:
        problems.append("fleet: empty; give at least one [[fleet]] entry with a device")
        return ()
    return tuple(
        FleetSection(**check_table(entry, f"fleet.{number}", SECTIONS["fleet"], problems))
        for number, entry in enumerate(entries)
    )


def _target(table: dict[str, Any], methods: list[str], problems: list[str]) -> TargetSection | None:
    if "target" not in table and "full" not in methods:
        return None
    target = TargetSection(
        **check_table(table.get("target", {}), "target", SECTIONS["target"], problems)
    )
    if target.method not in methods:
        problems.append(
            f"target.method: {target.method!r} is not among the methods ({', '.join(methods)}): "
            "add it to them, or choose one of them"
        )
    return target


def _deadline(table: dict[str, Any], problems: list[str]) -> DeadlineSection | None:
    if "deadline" not in table:
        return None
    section = check_table(table["deadline"], "deadline", SECTIONS["deadline"], problems)
    if (section["seconds"] is None) == (section["quantile"] is None):
        problems.append("deadline: give either seconds or a quantile")
    return DeadlineSection(**section)


def _across(data: dict[str, Any], fleet: tuple[FleetSection, ...], problems: list[str]) -> None:
    """Note what is wrong only in combination."""
    name = data["dataset"]
    if data["partition"] == "natural" and name in DATASETS and DATASETS.get(name).owner is None:
        owned = [other for other in DATASETS if DATASETS.get(other).owner is not None]
        problems.append(
            f"data.partition: {name} has no owners for a natural partition; "
            f"{' and '.join(owned)} have"
        )
    if data["layout"] == "correlated":
        if data["partition"] == "iid":
            problems.append("data.layout: a correlated layout deals dirichlet or natural, not iid")
        known = [entry for entry in fleet if entry.device in catalogue()]
        if known and len({device(e.device, slowdown=e.slowdown).slowdown for e in known}) == 1:
            problems.append("data.layout: correlated with speed, but all devices are equally fast")
    needed = sum(entry.count for entry in fleet) * data["min_examples"]
    if data["train_limit"] is not None and needed > data["train_limit"]:
        problems.append(
            f"data.train_limit: {data['train_limit']} examples cannot give every client "
            f"min_examples {data['min_examples']}; {needed} can"
        )


def _without(table: dict[str, Any], key: str) -> dict[str, Any]:
    return {other: value for other, value in table.items() if other != key}


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, (list, tuple)):
        return [_without_none(entry) for entry in value]
    return value
