"""The log of a process as lines of JSON in files of bounded size."""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
from contextlib import suppress
from pathlib import Path

__all__ = ["log_to_file"]

_MAX_BYTES = 2 * 2**20
_KEPT = 3


class _JsonLines(logging.Formatter):
    """One JSON object per record, so that whatever a message holds stays one line."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": round(record.created, 3),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry)


class _Patient(logging.handlers.RotatingFileHandler):
    """Says nothing of a disk that is full: a log must not end what it reports on."""

    def handleError(self, record: logging.LogRecord) -> None:
        del record

    def close(self) -> None:
        with suppress(OSError):
            super().close()


def log_to_file(path: str | os.PathLike[str], *, max_bytes: int = _MAX_BYTES) -> None:
    """Write what fl_elastic and Flower log to a file too, once per file and process.

    Parameters
    ----------
    path : path-like
        The file; when it has reached ``max_bytes`` it becomes ``NAME.1``, and so on up to three older ones.
    max_bytes : int
        Size of one file.
    """
    target = str(Path(path).absolute())
    for name in ("fl_elastic", "flwr"):
        logger = logging.getLogger(name)
        if any(getattr(each, "baseFilename", None) == target for each in logger.handlers):
            continue
        try:
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            handler = _Patient(target, maxBytes=max_bytes, backupCount=_KEPT, encoding="utf-8")
        except OSError as error:
            logger.warning("cannot log to %s: %s", target, error.strerror)
            return
        handler.setFormatter(_JsonLines())
        handler.setLevel(logging.INFO)
        logger.addHandler(handler)
        if logger.getEffectiveLevel() > logging.INFO:
            logger.setLevel(logging.INFO)
