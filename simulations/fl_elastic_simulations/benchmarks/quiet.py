"""Keep the log quiet while many rounds are run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["quiet_log"]


@contextmanager
def quiet_log(level: int = logging.ERROR) -> Iterator[None]:
    """Let Flower and fl_elastic log nothing below ``level`` meanwhile."""
    loggers = [logging.getLogger(name) for name in ("flwr", "fl_elastic")]
    before = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(level)
        yield
    finally:
        for logger, old in zip(loggers, before, strict=True):
            logger.setLevel(old)
