"""Trainer options and rules of selection out of flat settings, for helpers that take any of them by name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from fl_elastic.training import SelectionState, Timing, TrainablePart, TrainerOptions
from fl_elastic.training.selection import Reselection

__all__ = ["options_of", "settings_of"]


def settings_of(**flat: Any) -> dict[str, Any]:
    """Return ``options`` and ``state`` of a trainer."""
    rules = _taken(flat, Reselection)
    made: dict[str, Any] = {"options": options_of(**flat)}
    return made | ({"state": SelectionState(rules=Reselection(**rules))} if rules else {})


def options_of(**flat: Any) -> TrainerOptions:
    """Return the options whose groups have these settings."""
    timing, part = _taken(flat, Timing), _taken(flat, TrainablePart)
    groups = {"timing": Timing(**timing)} if timing else {}
    groups |= {"part": TrainablePart(**part)} if part else {}
    return TrainerOptions(**groups, **flat)


def _taken(flat: dict[str, Any], kind: type) -> dict[str, Any]:
    """Take the fields of a class out of the settings."""
    names = [each.name for each in fields(kind) if each.name in flat]
    return {name: flat.pop(name) for name in names}
