"""Availability of a device: from a trace in a CSV file, or drawn for days and nights."""

from __future__ import annotations

import csv
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from fl_elastic.errors import ScenarioError

DAY = 86_400.0
"""Number of seconds of a day."""

# Number of periods after which devices that repeat at different intervals are taken never to meet.
_MANY_PERIODS = 1000

COLUMNS = ("client", "from", "to")


@dataclass(frozen=True)
class Availability:
    """Times at which a device can be reached.

    Parameters
    ----------
    intervals : tuple of (float, float)
        Simulated seconds from which on, and before which, it can be reached; in order, and none touching the next.
    period : float, optional
        Number of seconds after which the intervals repeat, as in the traces of FedScale (Lai et al., ICML 2022).
        Its ``active`` and ``inactive`` are the beginnings and ends here, its ``finish_time`` is this.

    Raises
    ------
    ScenarioError
        If the intervals overlap or touch, are not in order, or do not lie within the period.

    Examples
    --------
    >>> nights = Availability(((0.0, 6.0), (22.0, 24.0)), period=24.0)
    >>> nights.there(5.0), nights.there(6.0), nights.comes(7.0), nights.leaves(46.5)
    (True, False, 22.0, 54.0)
    """

    intervals: tuple[tuple[float, float], ...]
    period: float | None = None

    def __post_init__(self) -> None:
        """Refuse intervals that are not in order."""
        last = -1.0
        for begins, ends in self.intervals:
            if not (0 <= begins < ends and begins > last):
                raise ScenarioError(
                    f"the time from {begins} to {ends} does not come after what was before it, or is empty"
                )
            last = ends
        if self.period is not None and not last <= self.period < math.inf:
            raise ScenarioError(
                f"a trace that goes to second {last} cannot be repeated every {self.period} seconds"
            )

    @classmethod
    def of(
        cls, intervals: Iterable[tuple[float, float]], period: float | None = None
    ) -> Availability:
        """Return the availability for intervals in any order, of which some may touch or overlap.

        >>> Availability.of([(5.0, 9.0), (0.0, 5.0)]).intervals
        ((0.0, 9.0),)
        """
        joined: list[tuple[float, float]] = []
        for begins, ends in sorted(intervals):
            if joined and begins <= joined[-1][1]:
                joined[-1] = joined[-1][0], max(ends, joined[-1][1])
            else:
                joined.append((begins, ends))
        return cls(tuple(joined), period)

    def there(self, time: float) -> bool:
        """Return whether the device can be reached at a time."""
        _, within, place = self._place(time)
        return place >= 0 and within < self.intervals[place][1]

    def leaves(self, time: float) -> float:
        """Return until when an available device stays; ``time`` itself if it is away."""
        if not self.there(time):
            return time
        base, _, place = self._place(time)
        ends = self.intervals[place][1]
        if ends != self.period or self.intervals[0][0] > 0:
            return base + ends
        # A device that is there at the end of a period and at the beginning of the next one stays.
        return math.inf if self._always else base + self.period + self.intervals[0][1]

    def comes(self, time: float) -> float:
        """Return the first time, not before ``time``, at which the device is there; infinity if there is none."""
        if self.there(time):
            return time
        base, _, place = self._place(time)
        if place + 1 < len(self.intervals):
            return base + self.intervals[place + 1][0]
        if self.period is None or not self.intervals:
            return math.inf
        return base + self.period + self.intervals[0][0]

    def _place(self, time: float) -> tuple[float, float, int]:
        """Return the start of the period, the time within it, and the last interval begun by then, or -1."""
        base = 0.0 if self.period is None else self.period * math.floor(time / self.period)
        return base, time - base, bisect_right(self._begins, time - base) - 1

    @cached_property
    def _begins(self) -> list[float]:
        return [begins for begins, _ in self.intervals]

    @property
    def _always(self) -> bool:
        return len(self.intervals) == 1 and self.intervals[0] == (0.0, self.period)


ALWAYS = Availability(((0.0, math.inf),))
"""Availability of a device that is never away."""


def when_enough(devices: Sequence[Availability], time: float, count: int) -> float:
    """Return the first time, not before ``time``, at which ``count`` devices are there together.

    Raises
    ------
    ScenarioError
        If there is no such time.

    Examples
    --------
    >>> one, other = Availability(((0.0, 5.0),)), Availability(((3.0, 9.0),))
    >>> when_enough([one, other], 0.0, 1), when_enough([one, other], 0.0, 2)
    (0.0, 3.0)
    """
    periods = {each.period for each in devices if each.period is not None}
    # After two periods, everything that repeats has been seen, unless devices repeat at different intervals.
    end = time + (2 if len(periods) < 2 else _MANY_PERIODS) * max(periods, default=0.0)
    last = max(
        (ends for each in devices for _, ends in each.intervals if ends < math.inf), default=0.0
    )
    most, now = 0, time
    while True:
        there = sum(each.there(now) for each in devices)
        if there >= count:
            return now
        most = max(most, there)
        coming = (each.comes(now) for each in devices if not each.there(now))
        now = max(min(coming, default=math.inf), math.nextafter(now, math.inf))
        if now > max(end, last):
            raise ScenarioError(
                f"from second {time:.0f} on, {count} devices are never there at the same time, at most {most}: ask "
                "for fewer, or let them be there longer"
            )


def read_trace(path: Path, period: float | None = None) -> dict[int, Availability]:
    """Return the availability of each client in a CSV file.

    Parameters
    ----------
    path : Path
        A table with the columns ``client`` (its number in the fleet, from 0), ``from`` and ``to`` (seconds of
        simulated time), and one line for each time that a client is there.
    period : float, optional
        Number of seconds after which the trace repeats.

    Raises
    ------
    ScenarioError
        If the file cannot be read or a line is invalid; the message names the line.
    """
    try:
        file = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from None
    # Read once for all clients, and again if it has been edited.
    return _read(path, period, (file.st_mtime_ns, file.st_size))


def _unreadable(path: Path, error: Exception) -> ScenarioError:
    return ScenarioError(f"the trace {path} cannot be read: {error}")


@lru_cache(maxsize=16)
def _read(path: Path, period: float | None, file: tuple[int, int]) -> dict[int, Availability]:
    del file
    found: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    try:
        # As spreadsheets write it, with a mark of the byte order, or as people do, with a space after each comma.
        with path.open(newline="", encoding="utf-8-sig") as lines:
            table = csv.DictReader(lines, skipinitialspace=True)
            missing = [name for name in COLUMNS if name not in (table.fieldnames or ())]
            if missing:
                raise ScenarioError(
                    f"{path} has no column {missing[0]!r}: a trace begins with the line {','.join(COLUMNS)}"
                )
            for row in table:
                found[_client(row, path, table.line_num)].append(_times(row, path, table.line_num))
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from None
    return {client: Availability.of(times, period) for client, times in found.items()}


def _client(row: dict[str, str | None], path: Path, line: int) -> int:
    text = (row["client"] or "").strip()
    if not text.isascii() or not text.isdigit():
        raise ScenarioError(f"{path}, line {line}: client {text!r} is not a number from 0")
    return int(text)


def _times(row: dict[str, str | None], path: Path, line: int) -> tuple[float, float]:
    try:
        begins, ends = float(row["from"] or ""), float(row["to"] or "")
    except ValueError:
        begins, ends = math.nan, math.nan
    if not 0 <= begins < ends:
        raise ScenarioError(
            f"{path}, line {line}: from {row['from']!r} to {row['to']!r} is no time: seconds from 0, the end after "
            "the beginning"
        )
    return begins, ends


def diurnal(
    share: float,
    *,
    swing: float,
    peak_hour: float,
    session_seconds: float,
    days: int,
    seed: tuple[int, int],
) -> Availability:
    """Draw when a device can be reached within ``days`` days, which then repeat.

    At hour h it is there with probability ``share * (1 + swing * cos(2 pi (h - peak_hour) / 24))``. Stays have an
    exponential length, and devices return at the rate that keeps this share. Bonawitz et al. (2019) report four
    times as many devices at night as by day, which is a swing of 0.6.

    Parameters
    ----------
    share : float
        Mean share of the time at which the device is there.
    swing : float
        Strength of the daily variation, from 0 (none) to 1.
    peak_hour : float
        Hour at which most devices are there; simulated time begins at midnight.
    session_seconds : float
        Mean length of a stay; the shares are exact only if it is short compared with a day.
    days : int
        Number of days to draw.
    seed : tuple of (int, int)
        Seed of the fleet, and number of the device.

    Raises
    ------
    ScenarioError
        If the share would be 1 or more at the peak.
    """
    most = share * (1 + swing)
    if not most < 1:
        raise ScenarioError(
            f"share {share} with a swing of {swing} is {most:.3g} at the peak: it has to stay below 1"
        )
    random, end = np.random.default_rng(seed), days * DAY

    def chance(time: float) -> float:
        phase = 2 * math.pi * (time / DAY - peak_hour / 24)
        return share * (1 + swing * math.cos(phase))

    intervals: list[tuple[float, float]] = []
    time, there = 0.0, random.random() < chance(0.0)
    fastest = most / (1 - most) / session_seconds
    while time < end:
        if there:
            until = min(time + random.exponential(session_seconds), end)
            intervals.append((time, until))
            time, there = until, False
            continue
        time += random.exponential(1 / fastest)
        now = chance(time)
        there = random.random() < now / (1 - now) / session_seconds / fastest
    # The last return may be after the end.
    return Availability.of([each for each in intervals if each[0] < each[1]], end)
