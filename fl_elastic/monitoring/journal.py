"""A file with a line of JSON per round, on the server and on every node."""

from __future__ import annotations

import io
import json
import logging
import logging.handlers
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from fl_elastic.state.files import private_file

_LOG = logging.getLogger("fl_elastic")
_MAX_BYTES = 2 * 2**20
_KEPT = 3


class Journal:
    """Appends one JSON object per line, and starts a new file when the old one is full.

    A write that fails, as on a full disk, is logged and raises no error. An incomplete line, left by a crash, is
    skipped by `read_journal` and terminated by the next write.

    Parameters
    ----------
    path : path-like
        The file; its folder is made if missing. The previous file is kept as ``NAME.1``.
    max_bytes : int
        Size at which a new file is started.
    """

    def __init__(self, path: str | os.PathLike[str], max_bytes: int = 4 * 2**20) -> None:
        self.path = Path(path)
        self.max_bytes = max_bytes

    def append(self, entry: dict[str, Any]) -> bool:
        """Append an entry; return whether it is on disk.

        Parameters
        ----------
        entry : dict
            Numbers, texts, lists and dicts of these; NaN and infinity, which JSON lacks, become null.
        """
        line = json.dumps(_finite(entry), sort_keys=True, allow_nan=False).encode() + b"\n"
        try:
            self._rotate(len(line))
            with os.fdopen(private_file(self.path, os.O_WRONLY | os.O_APPEND), "ab") as stream:
                if stream.tell() and not _ends_with_newline(self.path):
                    stream.write(b"\n")
                stream.write(line)
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            _LOG.warning("cannot write to %s: %s", self.path, error.strerror)
            return False
        return True

    def last(self) -> dict[str, Any] | None:
        """Return the newest readable entry, of the previous file if the present one has none; None without one."""
        for path in (self.path, _previous(self.path)):
            entries = read_journal(path)
            if entries:
                return entries[-1]
        return None

    def entries(self) -> list[dict[str, Any]]:
        """Return all readable entries, including those of the previous file, oldest first."""
        return [*read_journal(_previous(self.path)), *read_journal(self.path)]

    def remove(self) -> None:
        """Delete the file and the previous one."""
        for path in (self.path, _previous(self.path)):
            path.unlink(missing_ok=True)

    def _rotate(self, more: int) -> None:
        if self.path.exists() and self.path.stat().st_size + more > self.max_bytes:
            self.path.replace(_previous(self.path))


def read_journal(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the entries of a journal without invalid lines; none if the file is missing."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict):
            found.append(entry)
    return found


def _previous(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read(1) == b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value


class _JsonLines(logging.Formatter):
    """Formats each record as one JSON object, so that any message stays on one line."""

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


class _IgnoringDiskErrors(logging.handlers.RotatingFileHandler):
    """Rotating log file that ignores errors such as a full disk: logging must not end the process."""

    def handleError(self, record: logging.LogRecord) -> None:
        del record

    def _open(self) -> io.TextIOWrapper:
        found: Any = open(self.baseFilename, self.mode, encoding=self.encoding, opener=private_file)
        return found  # type: ignore[no-any-return]

    def close(self) -> None:
        with suppress(OSError):
            super().close()


def log_to_file(path: str | os.PathLike[str], *, max_bytes: int = _MAX_BYTES) -> None:
    """Write the log of fl_elastic and Flower also to a file; later calls with the same file do nothing.

    Parameters
    ----------
    path : path-like
        The file; at ``max_bytes`` it is renamed to ``NAME.1``, and so on, keeping up to three older files.
    max_bytes : int
        Size of one file.
    """
    target = str(Path(path).absolute())
    for name in ("fl_elastic", "flwr"):
        logger = logging.getLogger(name)
        if any(getattr(each, "baseFilename", None) == target for each in logger.handlers):
            continue
        try:
            handler = _IgnoringDiskErrors(
                target, maxBytes=max_bytes, backupCount=_KEPT, encoding="utf-8"
            )
        except OSError as error:
            logger.warning("cannot log to %s: %s", target, error.strerror)
            return
        handler.setFormatter(_JsonLines())
        handler.setLevel(logging.INFO)
        logger.addHandler(handler)
        if logger.getEffectiveLevel() > logging.INFO:
            logger.setLevel(logging.INFO)
