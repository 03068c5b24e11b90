"""Parameters of a test of which a few are tested each time, and the others where there is time for slow tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow_unless(is_first: Callable[..., bool], values: Iterable[Any]) -> list[Any]:
    """The values as parameters; those that are not among the first are marked slow."""
    found = []
    for each in values:
        row = each if isinstance(each, tuple) else (each,)
        found.append(pytest.param(*row, marks=() if is_first(*row) else pytest.mark.slow))
    return found
