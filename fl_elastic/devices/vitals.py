"""How a device is doing while it trains: heat, energy, power, disk, memory."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from fl_elastic.devices.energy import EnergyMeter
from fl_elastic.devices.platform import disk_free_bytes
from fl_elastic.devices.platform_files import HERE
from fl_elastic.devices.platform_memory import memory
from fl_elastic.devices.power import power_supply
from fl_elastic.devices.thermal import temperature, throttling

__all__ = ["Vitals"]

_KIB = 1024


class Vitals:
    """Watches the device from `begin` on; what the platform does not tell is left out.

    Parameters
    ----------
    state_dir : path-like
        Folder whose disk counts.
    root : Path
        Where ``sys``, ``proc`` and ``usr`` are found.

    Examples
    --------
    >>> sorted(Vitals("/", Path("/nowhere")).metrics())
    ['disk-free-bytes', 'peak-memory-bytes']
    """

    def __init__(self, state_dir: str | os.PathLike[str], root: Path = HERE) -> None:
        self._state_dir, self._root = state_dir, root
        self._meter = EnergyMeter(root).__enter__()

    def metrics(self) -> dict[str, float]:
        """Return the numbers at hand: degrees Celsius, joules since the start, shares, bytes."""
        self._meter.sample()
        energy, heat = self._meter.reading, throttling(self._root)
        supply = power_supply(self._root)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB
        found: dict[str, float | None] = {
            "temperature-celsius": temperature(self._root),
            "throttled": None if heat is None else float(heat.slowed),
            "under-voltage": None if heat is None else float(heat.under_voltage),
            "joules": None if energy is None else energy.joules,
            "on-mains": None if supply.on_mains is None else float(supply.on_mains),
            "battery": supply.battery,
            "disk-free-bytes": _float(disk_free_bytes(self._state_dir)),
            "memory-available-bytes": _float(memory(self._root).available_bytes),
            "peak-memory-bytes": float(peak),
        }
        return {name: value for name, value in found.items() if value is not None}


def _float(value: int | None) -> float | None:
    return None if value is None else float(value)
