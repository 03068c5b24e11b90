"""Checking a scenario's tables key by key, and gathering every problem instead of the first one."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fl_elastic.errors import ModelError, RegistryError, ScenarioError
from fl_elastic.named_models import check_model_name
from fl_elastic.registry import closest
from fl_elastic_simulations.data.datasets import check_dataset_name
from fl_elastic_simulations.data.layout import LAYOUTS
from fl_elastic_simulations.data.partition import PARTITIONS
from fl_elastic_simulations.scenario.devices import catalogue

__all__ = [
    "REQUIRED",
    "SECTIONS",
    "Rule",
    "check_keys",
    "check_table",
    "check_value",
    "raise_problems",
    "read_list",
]

Table = Mapping[str, Any]
Problems = list[str]

REQUIRED = object()
METHOD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


@dataclass(frozen=True)
class Rule:
    """What one key of a scenario may hold.

    Parameters
    ----------
    kind : type
        ``str`` (not empty), ``int``, ``float`` (a whole number is taken as well) or ``bool``.
    default : object
        Used where the key is left out; ``REQUIRED`` where it must not be.
    lowest, highest : float, optional
        Bounds that are allowed themselves.
    above, below : float, optional
        Bounds that are not.
    known : callable, optional
        Returns the names that are allowed.
    check : callable, optional
        Returns what is wrong with a value, or ``None``.
    """

    kind: type
    default: Any = REQUIRED
    lowest: float | None = None
    highest: float | None = None
    above: float | None = None
    below: float | None = None
    known: Callable[[], list[str]] | None = None
    check: Callable[[Any], str | None] | None = None


def _dataset_problem(name: str) -> str | None:
    try:
        check_dataset_name(name)
    except RegistryError as error:
        return str(error)
    return None


def _model_problem(name: str) -> str | None:
    try:
        check_model_name(name)
    except ModelError as error:
        return str(error)
    return None


SECTIONS: dict[str, dict[str, Rule]] = {
    "data": {
        "dataset": Rule(str, check=_dataset_problem),
        "partition": Rule(str, "iid", known=lambda: list(PARTITIONS)),
        "alpha": Rule(float, 0.5, above=0),
        "layout": Rule(str, "independent", known=lambda: list(LAYOUTS)),
        "min_examples": Rule(int, 10, lowest=1),
        "train_limit": Rule(int, None, lowest=1),
        "test_limit": Rule(int, None, lowest=1),
    },
    "model": {"name": Rule(str, check=_model_problem), "weights": Rule(str, None)},
    "training": {
        "rounds": Rule(int, lowest=1),
        "simulated_seconds": Rule(float, None, above=0),
        "evaluate_every": Rule(int, 1, lowest=1),
        "tests": Rule(int, None, lowest=1),
        "local_epochs": Rule(int, 1, lowest=1),
        "local_steps": Rule(int, None, lowest=1),
        "batch_size": Rule(int, 32, lowest=1),
        "optimizer": Rule(str, "sgd", known=lambda: ["adam", "adamw", "sgd"]),
        "learning_rate": Rule(float, 0.05, above=0),
        "momentum": Rule(float, 0.0, lowest=0, below=1),
        "weight_decay": Rule(float, 0.0, lowest=0),
        "client_fraction": Rule(float, 1.0, above=0, highest=1),
    },
    "deadline": {
        "seconds": Rule(float, None, above=0),
        "quantile": Rule(float, None, lowest=0, highest=1),
    },
    "fleet": {
        "name": Rule(str, None),
        "device": Rule(str, known=lambda: list(catalogue())),
        "count": Rule(int, 1, lowest=1, highest=10_000),
        "speedup": Rule(float, 1.0, lowest=1),
        "uplink_share": Rule(float, None, above=0, highest=1),
        "slowdown": Rule(float, None, above=0),
        "memory_bytes": Rule(int, None, lowest=1),
        "uplink_bytes_per_second": Rule(float, None, above=0),
        "downlink_bytes_per_second": Rule(float, None, above=0),
    },
    "target": {
        "method": Rule(str, "full"),
        "minus": Rule(float, 0.01, lowest=0, below=1),
    },
    # The names of policies and the like belong to their own registries and are checked there.
    "method": {
        "policy": Rule(str, None),
        "importance": Rule(str, "elastic"),
        "rule": Rule(str, "contributors"),
        "codec": Rule(str, "fp32"),
        "budgeted": Rule(bool, None),
        "server": Rule(str, "fedavg"),
        "peer": Rule(str, None),
        "stragglers": Rule(str, "fit", known=lambda: ["fit", "wait", "drop"]),
        "weighting": Rule(str, None, known=lambda: ["examples", "uniform"]),
        "normalise_steps": Rule(bool, False),
        "server_optimizer": Rule(str, None),
        "server_rate": Rule(float, None, above=0),
        "average": Rule(float, 0.0, lowest=0, below=1),
        "proximal": Rule(float, 0.0, lowest=0),
        "quota": Rule(int, 0, lowest=0),
        "blend": Rule(float, 0.0, lowest=0, below=1),
        "plan_source": Rule(str, "local", known=lambda: ["local", "server", "shared_rng"]),
        "deep_every": Rule(int, 4, lowest=0),
        "exploration": Rule(float, 0.3, lowest=0),
        "returns": Rule(float, 0.5, lowest=0, highest=1),
        "inference_prefix": Rule(bool, False),
    },
}


def check_table(
    value: object, where: str, rules: Mapping[str, Rule], problems: Problems
) -> dict[str, Any]:
    """Return the values of a table with defaults filled in, and note what is wrong with it.

    Parameters
    ----------
    value : object
        What the scenario has there; anything but a table is a problem.
    where : str
        Path of the table, as it starts each message ("fleet.0").
    rules : mapping
        Keys that the table may have.
    problems : list of str
        Where problems are added. A key with a problem gets its default, so checking goes on.

    Examples
    --------
    >>> problems: list[str] = []
    >>> check_table({"cuont": 2}, "fleet.0", {"count": Rule(int, 1, lowest=1)}, problems)
    {'count': 1}
    >>> problems
    ["fleet.0.cuont: unknown key (did you mean 'count'?)"]
    """
    if not isinstance(value, Mapping):
        problems.append(f"{where}: expected a table, got {_seen(value)}")
        return {key: rule.default for key, rule in rules.items()}
    check_keys(value, where, list(rules), problems)
    checked = {}
    for key, rule in rules.items():
        checked[key] = rule.default
        if key in value:
            checked[key] = check_value(value[key], f"{where}.{key}", rule, problems)
        elif rule.default is REQUIRED:
            problems.append(f"{where}.{key}: missing; it needs {_WORDS[rule.kind]}")
    return checked


def check_value(value: object, path: str, rule: Rule, problems: Problems) -> Any:
    """Return one value as the rule wants it, or note what is wrong and return the default."""
    problem = _problem(value, path.rpartition(".")[2], rule)
    if problem is not None:
        problems.append(f"{path}: {problem}")
        return rule.default
    return float(value) if rule.kind is float else value  # type: ignore[arg-type]


def check_keys(table: Table, where: str, known: list[str], problems: Problems) -> None:
    """Note every key of ``table`` that is not ``known``, with the nearest one that is."""
    for key in table:
        if key not in known:
            path = f"{where}.{key}" if where else str(key)
            problems.append(f"{path}: unknown key{closest(str(key), known)}")


def read_list(
    table: Table, key: str, kind: type, default: list[Any], problems: Problems
) -> list[Any]:
    """Return the list under ``key``: not empty, each of ``kind``, none twice; else note why not."""
    value = table.get(key, default)
    if not isinstance(value, list) or not value:
        problems.append(f"{key}: expected a list of at least one, got {_seen(value)}")
        return default
    is_seed = kind is int  # the widest seed that every random generator takes
    rule = Rule(kind, lowest=0 if is_seed else None, highest=2**32 - 1 if is_seed else None)
    good: list[Any] = []
    for position, entry in enumerate(value):
        problem = _problem(entry, key, rule)
        if problem is not None:
            problems.append(f"{key}.{position}: {problem}")
        elif entry in good:
            problems.append(f"{key}: {entry!r} is given twice")
        else:
            good.append(entry)
    return good or default


def raise_problems(source: str, problems: Problems) -> None:
    """Raise one ScenarioError for all problems, on one line where there is only one.

    Parameters
    ----------
    source : str
        Name of the scenario, for the message.
    problems : list of str
        What was found; nothing happens where it is empty.

    Raises
    ------
    ScenarioError
        If there is a problem.
    """
    if not problems:
        return
    if len(problems) == 1:
        raise ScenarioError(f"{source}: {problems[0]}")
    listed = "\n".join(f"  {problem}" for problem in problems)
    raise ScenarioError(f"{source}: {len(problems)} problems\n{listed}")


def _problem(value: object, key: str, rule: Rule) -> str | None:
    """Return what is wrong with a value, or ``None``."""
    allowed = (int, float) if rule.kind is float else (rule.kind,)
    if not isinstance(value, allowed) or (rule.kind is not bool and isinstance(value, bool)):
        return f"expected {_WORDS[rule.kind]}, got {_seen(value)}"
    if isinstance(value, str):
        return _text_problem(value, key, rule)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return _number_problem(value, rule)
    return None


def _text_problem(value: str, key: str, rule: Rule) -> str | None:
    if not value.strip():
        return "is empty; leave the key out for its default"
    if rule.known is not None and value not in (known := rule.known()):
        return f"unknown {key} {value!r}{closest(value, known)}: known are {', '.join(known)}"
    return rule.check(value) if rule.check is not None else None


def _number_problem(value: float, rule: Rule) -> str | None:
    if not -sys.float_info.max <= value <= sys.float_info.max:  # also where it is not a number
        return f"{value} is not a finite number"
    if rule.lowest is not None and value < rule.lowest:
        return f"{value} is below {rule.lowest}"
    if rule.above is not None and value <= rule.above:
        return f"{value} is not above {rule.above}"
    if rule.highest is not None and value > rule.highest:
        return f"{value} is above {rule.highest}"
    if rule.below is not None and value >= rule.below:
        return f"{value} is not below {rule.below}"
    return None


def _seen(value: object) -> str:
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    return repr(value)
