"""Readings that a source of a stream yields, and the registry of sources."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fl_elastic.registry import Registry

__all__ = ["LONGEST_LINE", "POLL_SECONDS", "SOURCES", "TOO_LONG", "Reading", "Source", "nobody"]

POLL_SECONDS = 0.2
LONGEST_LINE = 16 * 2**20
"""Most bytes of a line; a longer one is not a sample, and is not kept in memory."""
TOO_LONG = f"line too long: more than {LONGEST_LINE} bytes"


def nobody(_: dict[str, Any]) -> None:
    """Ignore the result of a reading."""


@dataclass(frozen=True)
class Reading:
    """The next item from a source: a sample, a late label, or silence.

    Parameters
    ----------
    x, y : object
        Sample and label as for `StreamLearner.observe`, unchecked, or `Unreadable` in place of ``x``. If ``x``,
        ``y`` and ``sample_id`` are all None, nothing has arrived for a moment.
    sample_id : int, str or None
        The sample whose late label ``y`` is.
    answer : callable
        Called with the result of handling it.
    ends : bool
        Whether it is the last one of a file, which is moved away when the next reading is requested.
    place : mapping or None
        Where the source continues after it, as JSON can hold it; None if the source cannot be read again.
    name : str or None
        The sender's name for the sample.
    """

    x: Any = None
    y: Any = None
    sample_id: int | str | None = None
    answer: Callable[[dict[str, Any]], None] = nobody
    ends: bool = False
    place: Mapping[str, Any] | None = None
    name: str | None = None

    @property
    def is_silence(self) -> bool:
        """Whether nothing has arrived."""
        return self.x is None and self.y is None and self.sample_id is None

    @property
    def awaits_answer(self) -> bool:
        """Whether it must be handled alone: a late label, or a sample whose sender waits for an answer."""
        return self.sample_id is not None or self.answer is not nobody


Source = Callable[[str, Mapping[str, Any], bool], Iterator[Reading]]
"""``(where, after, follow)`` to the readings that come after a place; the place is empty at the beginning."""

SOURCES: Registry[Source] = Registry("source")
