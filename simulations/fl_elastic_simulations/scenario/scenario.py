"""A scenario: everything that defines one simulated federation, read from a TOML file."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Le

from fl_elastic.errors import ScenarioError
from fl_elastic.settings import Text, Whole, approved, read_settings
from fl_elastic_simulations.data.datasets import DATASETS
from fl_elastic_simulations.scenario.sections import (
    DataSection,
    DeadlineSection,
    MethodSection,
    ModelSection,
    TargetSection,
    TrainingSection,
)
from fl_elastic_simulations.unequal.availability import ALWAYS
from fl_elastic_simulations.unequal.devices import OVERRIDABLE, device
from fl_elastic_simulations.unequal.fleet import (
    Client,
    Entries,
    Fleet,
    FleetSection,
    one_error,
    read_toml,
    traces_beside,
)

_METHOD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Scenario:
    """Everything that defines one simulated federation.

    Parameters
    ----------
    title : str
        Headline of the report.
    seeds : tuple of int
        Seeds; each method runs once per seed.
    methods : tuple of MethodSection
        Methods in the order in which they run.
    data, model, training, fleet, target, deadline
        Sections of the file. ``target`` is ``None`` if it is not given and no method is called ``full``;
        ``deadline`` is ``None`` if it is not given.

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
            If the file cannot be read, is not TOML (the message names the line), or is invalid (the message lists
            all problems).
        """
        path = Path(path)
        table = read_toml(path, "scenario")
        # Imported here: a node gets its finished scenario and does not need overrides.
        from fl_elastic_simulations.scenario.overrides import apply_overrides

        problems: list[str] = []
        try:
            changed = apply_overrides(table, overrides, problems)
            return cls._checked(traces_beside(changed, path.parent), path.name, problems)
        except RecursionError:
            raise ScenarioError(f"{path} is nested too deeply: no scenario is") from None

    @classmethod
    def from_json(cls, text: str) -> Scenario:
        """Read the text of :meth:`to_json`; it is checked like a file.

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
        except (ValueError, RecursionError) as error:
            raise ScenarioError(f"the scenario is not valid JSON: {error}") from None
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

    def fingerprint(self, method: MethodSection) -> str:
        """Return a fingerprint of this method in this scenario, whatever other methods and seeds there are.

        Devices count by their figures and by when they can be reached, not by the names of catalogue and traces.
        """
        table = json.loads(self.to_json())
        decisive = {name: table.get(name) for name in ("data", "model", "training", "deadline")}
        decisive["fleet"] = self._devices_as_numbers
        decisive["method"] = table["method"][method.name]
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]

    @cached_property
    def devices(self) -> Fleet:
        """The fleet, including the availability of each device."""
        return Fleet(self.fleet)

    @property
    def clients(self) -> tuple[Client, ...]:
        """The fleet, one entry per client, numbered in the order of the file."""
        return self.devices.clients

    @cached_property
    def _devices_as_numbers(self) -> list[Any]:
        pairs = zip(self.clients, self.devices.availabilities, strict=True)
        return [
            [
                client.device.name, *(getattr(client.device, figure) for figure in OVERRIDABLE),
                client.speedup, client.uplink_share, client.memory_bytes,
                None if there is ALWAYS else asdict(there),
            ]
            for client, there in pairs
        ]  # fmt: skip

    def method_named(self, name: str) -> MethodSection:
        """Return the method of this name.

        Raises
        ------
        ScenarioError
            If there is none.
        """
        for method in self.methods:
            if method.name == name:
                return method
        known = ", ".join(method.name for method in self.methods)
        raise ScenarioError(f"the scenario has no method {name!r}: known are {known}")

    @classmethod
    def _checked(cls, table: dict[str, Any], source: str, problems: list[str]) -> Scenario:
        file = read_settings(_File, _filled_in(table, problems), problems)
        if file is None or problems:
            raise one_error(source, problems)
        methods = tuple(file.method[name] for name in file.methods)
        target = file.target
        if target is None and "full" in file.methods:
            target = TargetSection()
        problems = [*_across(file), *_target_problems(target, file.methods)]
        if problems:
            raise one_error(source, problems)
        return cls(
            title=file.title or source,
            seeds=file.seeds,
            methods=methods,
            data=file.data,
            model=file.model,
            training=file.training,
            fleet=file.fleet,
            target=target,
            deadline=file.deadline,
        )


def _unlike(values: tuple[object, ...]) -> None:
    if not values:
        raise ScenarioError("expected a list of at least one, got an empty list")
    for position, value in enumerate(values):
        if value in values[:position]:
            raise ScenarioError(f"{value!r} is given twice")


def _method_names(names: tuple[str, ...]) -> None:
    for name in names:
        if not _METHOD_NAME.fullmatch(name):
            raise ScenarioError(f"{name!r} is not made of letters, digits and . _ - only")


# The largest seed that every random generator accepts.
_Seed = Annotated[Whole, Ge(0), Le(2**32 - 1)]


@dataclass(frozen=True)
class _File:
    """The allowed content of a scenario's file."""

    data: DataSection
    model: ModelSection
    training: TrainingSection
    fleet: Entries
    methods: Annotated[tuple[Text, ...], approved(_unlike), approved(_method_names)]
    method: Mapping[str, MethodSection]
    seeds: Annotated[tuple[_Seed, ...], approved(_unlike)] = (0,)
    title: Text | None = None
    target: TargetSection | None = None
    deadline: DeadlineSection | None = None


def _filled_in(table: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """Return the table with missing sections added; a method without a peer gets its name as default policy.

    Without a list of methods, all methods that have a table are run.
    """
    found = {"data": {}, "model": {}, "training": {}, "fleet": [], **table}
    given = table.get("method", {})
    if not isinstance(given, dict):
        return {"methods": ["full"], **found}
    names = found.setdefault("methods", list(given) or ["full", "elastic"])
    known = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    found["method"] = {
        name: _method(name, given.get(name, {}), problems)
        for name in dict.fromkeys([*given, *known])
    }
    return found


def _method(name: str, given: object, problems: list[str]) -> object:
    if not isinstance(given, dict):
        return given
    if "name" in given:
        problems.append(f"method.{name}.name: unknown key; its name is that of its table")
    budgeted = given.get("policy", name) != "full"
    # A peer does not use a policy.
    policy = name if given.get("peer") is None else "full"
    return {"policy": policy, "budgeted": budgeted, **given, "name": name}


def _target_problems(target: TargetSection | None, methods: Sequence[str]) -> list[str]:
    if target is None or target.method in methods:
        return []
    return [
        f"target.method: {target.method!r} is not among the methods ({', '.join(methods)}): "
        "add it to them, or choose one of them"
    ]


def _across(file: _File) -> list[str]:
    """Return problems of settings that are only invalid in combination."""
    problems = []
    data, training, deadline = file.data, file.training, file.deadline
    if deadline is not None and (deadline.seconds is None) == (deadline.quantile is None):
        problems.append("deadline: give either seconds or a quantile")
    if training.tests and not training.simulated_seconds:
        problems.append("training.tests: give simulated_seconds, which they are spread over")
    natural = data.partition == "natural"
    if natural and data.dataset in DATASETS and DATASETS.get(data.dataset).owner is None:
        owned = [other for other in DATASETS if DATASETS.get(other).owner is not None]
        problems.append(
            f"data.partition: {data.dataset} has no owners for a natural partition; "
            f"{', '.join(owned)} have"
        )
    if data.layout == "correlated":
        if data.partition not in ("dirichlet", "natural"):
            problems.append(
                f"data.layout: a correlated layout deals dirichlet or natural, not {data.partition}"
            )
        if len({device(e.device, slowdown=e.slowdown).slowdown for e in file.fleet}) == 1:
            problems.append("data.layout: correlated with speed, but all devices are equally fast")
    needed = sum(entry.count for entry in file.fleet) * data.min_examples
    if data.train_limit is not None and needed > data.train_limit:
        problems.append(
            f"data.train_limit: {data.train_limit} examples cannot give every client "
            f"min_examples {data.min_examples}; {needed} can"
        )
    return problems


def _without(table: dict[str, Any], key: str) -> dict[str, Any]:
    return {other: value for other, value in table.items() if other != key}


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, (list, tuple)):
        return [_without_none(entry) for entry in value]
    return value
