"""Helpers of all conformance checks: their type, instances of a plug-in, and failures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast

T = TypeVar("T")

Check: TypeAlias = Callable[[Any], None]


def instance_of(subject: type[T] | T) -> T:
    """Return an instance of the plug-in: ``subject`` itself, or a new one if it is a class.

    >>> instance_of(list), instance_of([1])
    ([], [1])
    """
    return cast(T, subject()) if isinstance(subject, type) else subject


def name_of(check: Check) -> str:
    """Return the descriptive name of a check, for use as a test id."""
    return str(getattr(check, "__name__", check))


def require(condition: bool, broken_rule: str) -> None:
    """Raise AssertionError unless ``condition`` holds, even under ``python -O``."""
    if not condition:
        raise AssertionError(broken_rule)
