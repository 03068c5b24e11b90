"""Show fl_elastic's log lines where Flower shows its own."""

from __future__ import annotations

import logging


class _ForwardToFlower(logging.Handler):
    """Forwards records to Flower's logger, whose handlers show an app's output."""

    def emit(self, record: logging.LogRecord) -> None:
        """Forward a record to Flower's logger."""
        logging.getLogger("flwr").handle(record)


def show_log() -> None:
    """Show lines of logger ``fl_elastic`` beside Flower's, from INFO on, unless logging is set up already.

    Without a handler, as in an app that ``flwr run`` starts, Python drops everything below a warning.
    """
    own = logging.getLogger("fl_elastic")
    if own.hasHandlers():
        return
    own.addHandler(_ForwardToFlower())
    if own.level == logging.NOTSET:
        own.setLevel(logging.INFO)
