"""Trainer options and constants of selection out of flat settings, for helpers that take any of them by name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from fl_elastic.training import SelectionState, Timing, TrainablePart, TrainerOptions
from fl_elastic.training.planner import Planner

CONSTANTS = ("probe_every", "below_cosine", "smoothing", "exploration")


def free_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let probes seem to take no time, so that a fit of a few steps has them too."""
    monkeypatch.setattr(Planner, "probe_seconds", 0.0)


def state_with(*remembered: Any, **constants: float) -> SelectionState:
    """Return a memory of scores whose constants have these values: for fits that are short, or always drift."""
    assert constants.keys() <= set(CONSTANTS)
    made: SelectionState = type("SelectionState", (SelectionState,), constants)(*remembered)
    return made


def settings_of(**flat: Any) -> dict[str, Any]:
    """Return ``options`` and ``state`` of a trainer."""
    constants = {name: flat.pop(name) for name in CONSTANTS if name in flat}
    made: dict[str, Any] = {"options": options_of(**flat)}
    return made | ({"state": state_with(**constants)} if constants else {})


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
