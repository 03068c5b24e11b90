"""What one check of the doctor found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "Status", "fail", "ok", "skipped", "warn"]

Status = Literal["ok", "warn", "fail", "skipped"]


@dataclass(frozen=True)
class Finding:
    """One check.

    Parameters
    ----------
    name : str
        What was looked at.
    status : {"ok", "warn", "fail", "skipped"}
        ``fail``: the fleet will not work with it; ``skipped``: it could not be looked at.
    seen : str
        What was found.
    remedy : str
        What to do; empty where nothing is to be done.
    """

    name: str
    status: Status
    seen: str
    remedy: str = ""


def ok(name: str, seen: str) -> Finding:
    """Return a finding that needs nothing."""
    return Finding(name, "ok", seen)


def warn(name: str, seen: str, remedy: str) -> Finding:
    """Return a finding that may cost something."""
    return Finding(name, "warn", seen, remedy)


def fail(name: str, seen: str, remedy: str) -> Finding:
    """Return a finding with which it will not work."""
    return Finding(name, "fail", seen, remedy)


def skipped(name: str, why: str) -> Finding:
    """Return a finding about what could not be looked at."""
    return Finding(name, "skipped", why)
