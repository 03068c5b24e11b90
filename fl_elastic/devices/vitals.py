"""Vital signs of a device while it trains: heat, power, disk, memory."""

from __future__ import annotations

import os
import re
import resource
from dataclasses import dataclass
from pathlib import Path

from fl_elastic.devices.platform import disk_free_bytes, memory
from fl_elastic.devices.platform_files import HERE, command_output, integer, matching, text_in
from fl_elastic.devices.power import power_supply

_COLDEST, _HOTTEST = -55.0, 150.0
"""Range of a working sensor on silicon, in degrees Celsius; other values mean a broken or missing sensor."""

_HEXADECIMAL = re.compile(r"(?:throttled=)?(?:0[xX])?([0-9a-fA-F]{1,8})")
# Flags of the firmware: under-voltage; clock capped, throttled, or softly limited by heat.
_UNDER_VOLTAGE, _SLOWED = 0x1, 0xE
_KIB = 1024


@dataclass(frozen=True)
class Throttling:
    """Report of a Raspberry Pi's firmware on power supply and heat.

    Parameters
    ----------
    under_voltage : bool
        Whether the supply voltage is too low now.
    slowed : bool
        Whether the device is slowed down now.

    Notes
    -----
    Bits of ``vcgencmd get_throttled``, from the documentation of Raspberry Pi OS.
    """

    under_voltage: bool
    slowed: bool


def parse_celsius(text: str | None) -> float | None:
    """Return the degrees Celsius from a sensor's file, which counts thousandths; None if implausible.

    Examples
    --------
    >>> parse_celsius("48312"), parse_celsius("-274000"), parse_celsius("n/a")
    (48.312, None, None)
    """
    value = integer(text)
    if value is None or not _COLDEST <= value / 1000 <= _HOTTEST:
        return None
    return value / 1000


def parse_throttled(text: str | None) -> Throttling | None:
    """Return the flags in the firmware's answer, with or without the prefix ``throttled=``; None if there are none.

    Examples
    --------
    >>> parse_throttled("throttled=0x50005").under_voltage
    True
    >>> parse_throttled("0").slowed, parse_throttled("error") is None
    (False, True)
    """
    found = _HEXADECIMAL.fullmatch((text or "").strip())
    if not found:
        return None
    bits = int(found[1], 16)
    return Throttling(bool(bits & _UNDER_VOLTAGE), bool(bits & _SLOWED))


def temperature(root: Path = HERE) -> float | None:
    """Return the degrees Celsius of the hottest processor sensor, or else of any sensor; None if there is none.

    Thermal zones come first: the platform itself acts on them. Other sensors (disks, radios) count only if there
    are no zones.

    Parameters
    ----------
    root : Path
        Folder that contains ``sys``.

    Examples
    --------
    >>> temperature(Path("/nowhere")) is None
    True
    """
    for pattern in ("sys/class/thermal/thermal_zone*/temp", "sys/class/hwmon/hwmon*/temp*_input"):
        shown = (parse_celsius(text_in(path)) for path in matching(root, pattern))
        degrees = [value for value in shown if value is not None]
        if degrees:
            return max(degrees)
    return None


def throttling(root: Path = HERE) -> Throttling | None:
    """Return the report of a Raspberry Pi's firmware, from its file or its command; None if there is none.

    Parameters
    ----------
    root : Path
        Folder that contains ``sys`` and ``usr``.

    Notes
    -----
    The command needs access to ``/dev/vcio`` (group ``video``).
    """
    # Up to the Pi 4 the folder is "soc:firmware" below "soc"; on the Pi 5 its name contains an address.
    for pattern in (
        "sys/devices/platform/*/*firmware/get_throttled",
        "sys/devices/platform/*firmware/get_throttled",
    ):
        for path in matching(root, pattern):
            flags = parse_throttled(text_in(path))
            if flags is not None:
                return flags
    return parse_throttled(command_output(root, ["vcgencmd", "get_throttled"]))


def vitals(state_dir: str | os.PathLike[str], root: Path = HERE) -> dict[str, float]:
    """Return the device's vital signs in degrees Celsius, shares and bytes; those not reported are left out.

    Parameters
    ----------
    state_dir : path-like
        Folder whose disk is measured.
    root : Path
        Folder that contains ``sys``, ``proc`` and ``usr``.

    Examples
    --------
    >>> sorted(vitals("/", Path("/nowhere")))
    ['disk-free-bytes', 'peak-memory-bytes']
    """
    heat, supply = throttling(root), power_supply(root)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB
    found: dict[str, float | None] = {
        "temperature-celsius": temperature(root),
        "throttled": None if heat is None else float(heat.slowed),
        "under-voltage": None if heat is None else float(heat.under_voltage),
        "on-mains": None if supply.on_mains is None else float(supply.on_mains),
        "battery": supply.battery,
        "disk-free-bytes": _float(disk_free_bytes(state_dir)),
        "memory-available-bytes": _float(memory(root).available_bytes),
        "peak-memory-bytes": float(peak),
    }
    return {name: value for name, value in found.items() if value is not None}


def _float(value: int | None) -> float | None:
    return None if value is None else float(value)
