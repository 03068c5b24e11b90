"""The joules that a piece of work took, as far as the platform can tell."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

from fl_elastic.devices.platform_files import (
    HERE,
    command_output,
    integer_in,
    matching,
    text_in,
)

__all__ = [
    "Counter",
    "CounterSource",
    "EnergyMeter",
    "EnergyReading",
    "PowerSource",
    "counter_joules",
    "energy_source",
    "parse_pmic",
]

_ADC = re.compile(r"\s*(\S{1,40})_([AV])\s+(?:current|volt)\(\d+\)=([0-9.]{1,20})[AV]\s*")
_WHOLE_BOARD = ("vdd_in", "total", "vin", "input", "5v_in")
"""Labels of a sensor that measures everything behind the other sensors of its chip."""


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


@dataclass(frozen=True)
class Counter:
    """One reading of a counter that only grows, in microjoules.

    Parameters
    ----------
    microjoules : int
        Since some moment in the past.
    wraps_at : int or None
        It starts again at zero after this value; None if it says nothing of that.
    """

    microjoules: int
    wraps_at: int | None = None


@dataclass(frozen=True)
class CounterSource:
    """A platform that counts joules.

    Parameters
    ----------
    name : str
        "rapl" or "hwmon".
    read : callable
        Returns the present counters by the name of their sensor.
    """

    name: str
    read: Callable[[], Mapping[str, Counter]]


@dataclass(frozen=True)
class PowerSource:
    """A platform that tells the power of this moment.

    Parameters
    ----------
    name : str
        "hwmon" or "pmic".
    read : callable
        Returns watts, or None if nothing answers now.
    """

    name: str
    read: Callable[[], float | None]


def counter_joules(before: Mapping[str, Counter], after: Mapping[str, Counter]) -> float | None:
    """Return the joules between two readings, or None if a counter was lost or ran backwards.

    A counter that wrapped is taken to have wrapped once.

    Examples
    --------
    >>> counter_joules({"a": Counter(900_000, 1_000_000)}, {"a": Counter(100_000, 1_000_000)})
    0.2
    """
    total = 0
    for name, first in before.items():
        last = after.get(name)
        if last is None:
            return None
        grown = last.microjoules - first.microjoules
        if grown < 0:
            if first.wraps_at is None or first.wraps_at < first.microjoules:
                return None
            grown += first.wraps_at
        if grown < 0:
            return None
        total += grown
    return total / 1e6 if before else None


def parse_pmic(text: str | None) -> float | None:
    r"""Return the watts in what the power chip of a Raspberry Pi 5 says: volts times amperes per rail.

    Rails with only one of the two figures do not count. What hangs on the 5 V pins and USB ports, and
    the losses of the chip itself, is not in the sum: it is a lower bound of what the plug delivers.

    Examples
    --------
    >>> parse_pmic("VDD_CORE_A current(7)=2.0A\n VDD_CORE_V volt(15)=0.75V\n EXT5V_V volt(24)=5.1V")
    1.5
    """
    figures: dict[str, dict[str, float]] = {}
    for line in (text or "").splitlines():
        found = _ADC.fullmatch(line)
        if not found:
            continue
        try:
            figures.setdefault(found[1], {})[found[2]] = float(found[3])
        except ValueError:
            continue
    watts = [rail["A"] * rail["V"] for rail in figures.values() if len(rail) == 2]
    return sum(watts) if watts and math.isfinite(sum(watts)) else None


def _rapl(root: Path) -> dict[str, Counter]:
    """Return packages and their memory; cores and graphics are parts of a package counted already."""
    found: dict[str, Counter] = {}
    for zone in matching(root, "sys/class/powercap/intel-rapl:*"):
        name = text_in(zone / "name") or ""
        value = integer_in(zone / "energy_uj")
        if value is not None and value >= 0 and (name.startswith("package") or name == "dram"):
            found[zone.name] = Counter(value, integer_in(zone / "max_energy_range_uj"))
    return found


def _hwmon_counters(root: Path) -> dict[str, Counter]:
    found: dict[str, Counter] = {}
    sockets = set()
    for path in matching(root, "sys/class/hwmon/hwmon*/energy*_input"):
        value = integer_in(path)
        if value is None or value < 0:
            continue
        name = str(path)
        found[name] = Counter(value)
        label = text_in(path.with_name(path.name.replace("_input", "_label"))) or ""
        if label.lower().startswith("esocket"):
            sockets.add(name)
    # Drivers that label whole sockets count each core beside them once more.
    return {name: found[name] for name in sockets} if sockets else found


def _hwmon_power(root: Path) -> float | None:
    watts: list[float] = []
    for chip in matching(root, "sys/class/hwmon/hwmon*"):
        channels = {}
        for path in matching(chip, "power*_input"):
            value = integer_in(path)
            if value is not None and value >= 0:
                label = text_in(path.with_name(path.name.replace("_input", "_label"))) or path.name
                channels[label.lower()] = value / 1e6
        whole = [power for label, power in channels.items() if label in _WHOLE_BOARD]
        watts += whole[:1] if whole else channels.values()
    return sum(watts) if watts else None


def _pmic(root: Path) -> float | None:
    return parse_pmic(command_output(root, ["vcgencmd", "pmic_read_adc"]))


def energy_source(root: Path = HERE) -> CounterSource | PowerSource | None:
    """Return the best source of this platform, or None if it has none that this user may read.

    Parameters
    ----------
    root : Path
        Where ``sys`` and ``usr`` are found.

    Examples
    --------
    >>> energy_source(Path("/nowhere")) is None
    True
    """
    counters = (("rapl", _rapl), ("hwmon", _hwmon_counters))
    for name, read_counters in counters:
        if read_counters(root):
            return CounterSource(name, lambda read=read_counters: read(root))  # type: ignore[misc]
    powers = (("hwmon", _hwmon_power), ("pmic", _pmic))
    for name, read_power in powers:
        if read_power(root) is not None:
            return PowerSource(name, lambda read=read_power: read(root))  # type: ignore[misc]
    return None
