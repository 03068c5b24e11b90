"""Show fl_elastic's log lines where Flower shows its own."""

from __future__ import annotations

import logging

__all__ = ["show_log"]


class _BesideFlowers(logging.Handler):
    """Hands lines on to Flower's logger, whose handlers follow the output of an app wherever it goes."""

    def emit(self, record: logging.LogRecord) -> None:
        """Let Flower's logger write it."""
        logging.getLogger("flwr").handle(record)


def show_log() -> None:
    """Show lines of logger ``fl_elastic`` beside Flower's, from INFO on, unless somebody has said where they go.

    Python drops what is below a warning where no handler is set up, as in an app that ``flwr run`` starts.
    """
    own = logging.getLogger("fl_elastic")
    if own.hasHandlers():
        return
    own.addHandler(_BesideFlowers())
    if own.level == logging.NOTSET:
        own.setLevel(logging.INFO)
