"""Result of one check of the doctor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail", "skipped"]


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Parameters
    ----------
    name : str
        What was checked.
    status : {"ok", "warn", "fail", "skipped"}
        ``fail``: the fleet will not work in this state; ``skipped``: the check was not possible.
    seen : str
        What was found.
    remedy : str
        What to do; empty if nothing needs to be done.
    """

    name: str
    status: Status
    seen: str
    remedy: str = ""


def ok(name: str, seen: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(name, "ok", seen)


def warn(name: str, seen: str, remedy: str) -> Finding:
    """Return a finding that may cause a problem."""
    return Finding(name, "warn", seen, remedy)


def fail(name: str, seen: str, remedy: str) -> Finding:
    """Return a finding with which the fleet will not work."""
    return Finding(name, "fail", seen, remedy)


def skipped(name: str, why: str) -> Finding:
    """Return a finding about something that could not be checked."""
    return Finding(name, "skipped", why)
