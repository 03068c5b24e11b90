"""Settings of every test: one torch thread, fixed seeds, patient hypothesis."""

from __future__ import annotations

import gc
import logging
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _pytest.doctest import DoctestModule
from hypothesis import HealthCheck, settings

settings.register_profile(
    "fl_elastic",
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("fl_elastic")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="session")
def _no_seeds_for_accelerators_that_are_not_there() -> Iterator[None]:
    # `torch.manual_seed` formats the stack once for each kind, to say later where it was called.
    with pytest.MonkeyPatch.context() as patch:
        if not torch.accelerator.is_available():
            for kind in (torch.cuda, torch.xpu, torch.mtia):
                patch.setattr(kind, "manual_seed_all", lambda seed: None, raising=False)
        yield


@pytest.fixture(autouse=True, scope="session")
def _torchs_loggers_are_heard_at_the_root() -> None:
    # Pytest would put its handlers into each of those that do not propagate, six times in each test.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    np.random.seed(0)


@pytest.fixture(autouse=True)
def _loggers_and_threads_as_they_were() -> Iterator[None]:
    """Let no test go on writing what later ones log, or change how many threads they have."""
    loggers = [logging.getLogger(name) for name in ("fl_elastic", "flwr")]
    before = [(each, list(each.handlers), each.level, each.propagate) for each in loggers]
    threads = torch.get_num_threads()
    yield
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    for logger, handlers, level, propagate in before:
        logger.setLevel(level)
        logger.propagate = propagate
        for added in set(logger.handlers) - set(handlers):
            added.close()
        logger.handlers[:] = handlers


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
    """Begin with what starts real processes, then simulations: they take longest, and the rest fills the time."""

    def turn(item: pytest.Item) -> int:
        if any(map(item.get_closest_marker, ("deploy", "browser"))):
            return 0
        return 1 if item.path.is_relative_to(item.config.rootpath / "simulations" / "tests") else 2

    items.sort(key=turn)


def pytest_collection_finish() -> None:
    """Take what was imported out of the collector's passes, each of which would look at 800,000 objects again."""
    gc.collect()
    gc.freeze()
