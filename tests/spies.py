"""Record which functions are called."""

from __future__ import annotations

from typing import Any

import pytest


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
