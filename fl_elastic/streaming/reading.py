"""What a source of a stream gives, and the kinds of sources there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fl_elastic.registry import Registry

__all__ = ["LONGEST_LINE", "POLL_SECONDS", "SOURCES", "TOO_LONG", "Reading", "Source", "nobody"]

POLL_SECONDS = 0.2
LONGEST_LINE = 16 * 2**20
"""Bytes; what is longer is no sample, and not kept in memory to find out."""
TOO_LONG = f"line too long: more than {LONGEST_LINE} bytes"


def nobody(_: dict[str, Any]) -> None:
    """Hear nothing of what came of a reading."""


@dataclass(frozen=True)
class Reading:
    """What a source gives next.

    Parameters
    ----------
    x, y : object
        As `StreamLearner.observe` takes them, unchecked, or `Unreadable` in place of ``x``; with none of ``x``,
        ``y`` and ``sample_id`` nothing has come for a moment.
    sample_id : int, str or None
        The sample that ``y`` is a late label of.
    answer : callable
        Is told what came of it.
    ends : bool
        Whether it is the last of a file, which is put away once a further reading is asked for.
    place : mapping or None
        From where the source goes on after it, if it can be read again; JSON can hold it.
    name : str or None
        What the sender calls the sample.
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
        """Whether nothing has come."""
        return self.x is None and self.y is None and self.sample_id is None

    @property
    def awaits_answer(self) -> bool:
        """Whether it is a late label, or its sender is told what came of it: then it is handled by itself."""
        return self.sample_id is not None or self.answer is not nobody


Source = Callable[[str, Mapping[str, Any], bool], Iterator[Reading]]
"""``(where, after, follow)`` to readings that come after a place, which is empty at the beginning."""

SOURCES: Registry[Source] = Registry("source")
