"""Reading values out of TOML tables that a person may have edited."""

from __future__ import annotations

from typing import Any

from fl_elastic.errors import FleetError
from fl_elastic.fleet.names import Scalar

__all__ = ["as_scalars", "as_table", "as_text", "as_truth", "list_at"]


def as_table(value: object, what: str) -> dict[str, Any]:
    """Return a table, or raise `FleetError` that names ``what``."""
    if not isinstance(value, dict):
        raise FleetError(f"{what} is a {type(value).__name__}; expected a table")
    return value


def as_text(value: object, what: str) -> str:
    """Return a text, or raise `FleetError` that names ``what``."""
    if not isinstance(value, str):
        raise FleetError(f"{what} is {value!r}; expected text")
    return value


def as_truth(value: object, what: str) -> bool:
    """Return a truth value, or raise `FleetError` that names ``what``."""
    if not isinstance(value, bool):
        raise FleetError(f"{what} is {value!r}; expected true or false")
    return value


def as_scalars(value: object, what: str) -> dict[str, Scalar]:
    """Return a table of single values, or raise `FleetError` that names ``what``."""
    table = as_table(value, what)
    for key, found in table.items():
        if not isinstance(found, (bool, int, float, str)):
            kind = type(found).__name__
            raise FleetError(f"{what}: {key} is a {kind}; expected a number, true, false or text")
    return table


def list_at(table: dict[str, Any], key: str) -> list[Any]:
    """Return the list at ``key``, empty where there is none, or raise `FleetError`."""
    value = table.get(key, [])
    if not isinstance(value, list):
        raise FleetError(f"{key} is a {type(value).__name__}; expected a list")
    return value
