"""Changing single values of a scenario from the command line: ``--set training.rounds=5``."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Iterable
from typing import Any

# These keys are lists even if a single bare value is given: methods=full, seeds=0.
_LISTS = ("methods", "seeds")


def parse_value(text: str) -> Any:
    """Read a value as TOML, or otherwise as a bare word or a list separated by commas.

    Parameters
    ----------
    text : str
        Text after the equals sign.

    Examples
    --------
    >>> parse_value("0.1"), parse_value("full,elastic"), parse_value("0,1"), parse_value("[1, 2]")
    (0.1, ['full', 'elastic'], [0, 1], [1, 2])
    """
    try:
        read = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        read = {}
    if read.keys() == {"value"}:  # a line break in the text could have smuggled in other keys
        return read["value"]
    if "," in text and not text.startswith(("[", "{", '"', "'")):
        return [parse_value(part.strip()) for part in text.split(",") if part.strip()]
    return text


def apply_overrides(
    table: dict[str, Any], overrides: Iterable[str], problems: list[str]
) -> dict[str, Any]:
    """Return a copy of a scenario's table with some values set.

    Parameters
    ----------
    table : dict
        The scenario as read from its file.
    overrides : iterable of str
        Each ``key=value``; the key is dotted, with entries of a list by number (``fleet.0.count=3``). Later checks
        find unknown keys.
    problems : list of str
        List to which overrides that cannot be applied are added.

    Examples
    --------
    >>> apply_overrides({"fleet": [{"count": 1}]}, ["fleet.0.count=3"], [])
    {'fleet': [{'count': 3}]}
    """
    changed = copy.deepcopy(table)
    for override in overrides:
        key, equals, text = override.partition("=")
        path = [part.strip() for part in key.split(".")]
        if not equals or not all(path) or not text.strip():
            problems.append(f"override {override!r}: expected key=value, as in training.rounds=5")
            continue
        value = parse_value(text.strip())
        if path[0] in _LISTS and len(path) == 1 and not isinstance(value, list):
            value = [value]
        problem = _set(changed, path, value)
        if problem is not None:
            problems.append(f"override {override!r}: {problem}")
    return changed


def _set(table: dict[str, Any], path: list[str], value: Any) -> str | None:
    """Set one value and return what prevented it, or ``None``."""
    place: Any = table
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        where = ".".join(path[:depth])
        if isinstance(place, list):
            if not part.isdecimal() or int(part) >= len(place):
                return f"{where} has {len(place)} entries, numbered from 0, and no {part!r}"
            step: Any = int(part)
        elif isinstance(place, dict):
            step = part
            if not last:
                place.setdefault(part, {})
        else:
            return f"{where} is a value, not a table"
        if last:
            place[step] = value
        else:
            place = place[step]
    return None
