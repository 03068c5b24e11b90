"""Record which functions are called."""

from __future__ import annotations

from typing import Any

import pytest

from fl_elastic.ops.split import SplitModel


def spied(patch: pytest.MonkeyPatch, owner: Any, *names: str) -> list[str]:
    """Let the functions ``names`` of ``owner`` add their name to the list that is returned, when called."""
    called: list[str] = []

    def spy(name: str, function: Any) -> Any:
        def run(*arguments: Any) -> Any:
            called.append(name)
            return function(*arguments)

        return run

    for name in names:
        patch.setattr(owner, name, spy(name, getattr(owner, name)))
    return called


def passing_below(patch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each pass below a cut adds its number of examples."""
    passed: list[int] = []
    below = SplitModel.features

    def features(split: SplitModel, inputs: Any) -> Any:
        passed.append(len(inputs))
        return below(split, inputs)

    patch.setattr(SplitModel, "features", features)
    return passed
