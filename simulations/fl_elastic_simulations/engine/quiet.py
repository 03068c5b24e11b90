"""Silence the log while many rounds run."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def quiet_log(
    level: int = logging.ERROR, of: Sequence[str] = ("flwr", "fl_elastic")
) -> Iterator[None]:
    """Within this context, log only records of Flower and fl_elastic, or of given packages, from ``level`` on."""
    loggers = [logging.getLogger(name) for name in of]
    before = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(level)
        yield
    finally:
        for logger, old in zip(loggers, before, strict=True):
            logger.setLevel(old)
