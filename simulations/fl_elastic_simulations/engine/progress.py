"""Listeners for the progress of a simulation."""

from __future__ import annotations

import logging

_LOG = logging.getLogger("fl_elastic")


class Progress:
    """Listens to the progress of a simulation, and does nothing."""

    def cell(self, method: str, seed: int, rounds: int) -> None:
        """Handle the start of a method with a seed."""

    def reply(self, received: int, expected: int) -> None:
        """Handle a client's answer."""

    def round(self, number: int, accuracy: float, loss: float, simulated_seconds: float) -> None:
        """Handle the quality of the global model after a round."""


class LoggedProgress(Progress):
    """Writes a line per method, seed and round to the log; Flower logs replies itself."""

    def cell(self, method: str, seed: int, rounds: int) -> None:
        """Log the start."""
        _LOG.info("%s, seed %s: %s rounds", method, seed, rounds)

    def round(self, number: int, accuracy: float, loss: float, simulated_seconds: float) -> None:
        """Log the quality of the global model."""
        _LOG.info("round %s: accuracy %.4f, loss %.4f, %.1f s simulated",
                  number, accuracy, loss, simulated_seconds)  # fmt: skip
