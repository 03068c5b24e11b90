"""The joules that a piece of work took, as far as the platform can tell."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

from fl_elastic.devices.energy_sources import (
    Counter,
    CounterSource,
    PowerSource,
    counter_joules,
    energy_source,
)
from fl_elastic.devices.platform_files import HERE

__all__ = ["EnergyMeter", "EnergyReading"]


@dataclass(frozen=True)
class EnergyReading:
    """What was measured, and how.

    Parameters
    ----------
    joules : float
        Energy of everything that the source covers, other programs included.
    seconds : float
        Time between the first and the last look.
    method : {"counter", "sampled"}
        A counter missed nothing. Samples are joined by straight lines, so power between them is a
        guess.
    source : str
        "rapl", "hwmon" or "pmic".
    samples : int
        Looks at the source.
    """

    joules: float
    seconds: float
    method: Literal["counter", "sampled"]
    source: str
    samples: int


class EnergyMeter:
    """Measures the block that it surrounds; it never raises and knows nothing where nothing is told.

    Parameters
    ----------
    root : Path
        Where ``sys`` and ``usr`` are found.
    clock : callable
        Seconds that only grow.

    Examples
    --------
    >>> with EnergyMeter(Path("/nowhere")) as meter:
    ...     meter.sample()
    >>> meter.reading is None
    True
    """

    def __init__(
        self, root: Path = HERE, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._root = root
        self._clock = clock
        self._source: CounterSource | PowerSource | None = None
        self._counters: Mapping[str, Counter] = {}
        self._watts: float | None = None
        self._began = self._last = 0.0
        self._joules: float | None = 0.0
        self._samples = 0

    def __enter__(self) -> EnergyMeter:
        """Look for the first time."""
        self._source = energy_source(self._root)
        self._joules, self._samples = 0.0, 0
        self._look()
        self._began = self._last
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Look for the last time; an exception of the block passes."""
        self.sample()

    def sample(self) -> None:
        """Look once more in between, say after each step.

        Makes sampled power more exact, and lets a counter wrap once between any two looks instead
        of once in all.
        """
        then, counters, watts = self._last, self._counters, self._watts
        self._look()
        part: float | None = None
        if isinstance(self._source, CounterSource):
            part = counter_joules(counters, self._counters)
        elif watts is not None and self._watts is not None:
            part = (watts + self._watts) / 2 * (self._last - then)
        self._joules = None if part is None or self._joules is None else self._joules + part

    def _look(self) -> None:
        if isinstance(self._source, CounterSource):
            self._counters = self._source.read()
        elif isinstance(self._source, PowerSource):
            self._watts = self._source.read()
        self._last = self._clock()
        self._samples += 1

    @property
    def reading(self) -> EnergyReading | None:
        """What was measured up to the last look; None if the platform told nothing, or not all."""
        if self._source is None or self._joules is None or self._samples < 2:
            return None
        return EnergyReading(
            joules=self._joules,
            seconds=self._last - self._began,
            method="counter" if isinstance(self._source, CounterSource) else "sampled",
            source=self._source.name,
            samples=self._samples,
        )
