"""Settings of every test: one torch thread, fixed seeds, patient hypothesis."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _pytest.doctest import DoctestModule
from hypothesis import HealthCheck, settings

settings.register_profile(
    "fl_elastic", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("fl_elastic")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    np.random.seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, Any, Any]:
    """Import for doctests what has some: what models of the tests import takes long, in each process."""
    found = yield
    return [
        each
        for each in found
        if not isinstance(each, DoctestModule) or ">>>" in file_path.read_text(encoding="utf-8")
    ]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what starts real processes: it takes longest, and the others fill the rest of the time."""
    items.sort(key=lambda item: not any(map(item.get_closest_marker, ("deploy", "browser"))))
