"""Power supply of a device: whether it has mains power, and the charge of its battery."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fl_elastic.devices.platform_files import HERE, integer, matching, text_in

_OUTER = frozenset({"mains", "usb", "wireless"})
_BATTERIES = frozenset({"battery", "ups"})
_FED_FROM_OUTSIDE = frozenset({"charging", "full", "not charging"})


@dataclass(frozen=True)
class PowerSupply:
    """State of the power supply; a value is None if the platform does not report it.

    Parameters
    ----------
    on_mains : bool or None
        Whether the device has external power.
    battery : float or None
        Charge of the battery from 0 to 1; the mean if there are several.
    """

    on_mains: bool | None
    battery: float | None


@dataclass(frozen=True)
class SupplyEntry:
    """Linux's description of one supply: the texts of its files, None if a file is absent.

    Parameters
    ----------
    kind : str or None
        "Mains", "USB", "Battery", "UPS", "Wireless".
    online : str or None
        "0" or "1"; "2" if the voltage is negotiated.
    capacity : str or None
        Charge in percent.
    status : str or None
        "Charging", "Discharging", "Full", "Not charging" or "Unknown".
    scope : str or None
        "Device" for the battery of a mouse or a pen, which does not feed this computer.
    """

    kind: str | None = None
    online: str | None = None
    capacity: str | None = None
    status: str | None = None
    scope: str | None = None


def _charge(capacity: str | None) -> float | None:
    percent = integer(capacity)
    return percent / 100 if percent is not None and 0 <= percent <= 100 else None


def _word(text: str | None) -> str:
    return (text or "").strip().lower()


def read_supply(entries: list[SupplyEntry]) -> PowerSupply:
    """Return the state of the power supply, from all entries together.

    Examples
    --------
    >>> read_supply([SupplyEntry("Mains", online="0"), SupplyEntry("Battery", capacity="40")])
    PowerSupply(on_mains=False, battery=0.4)
    >>> read_supply([SupplyEntry("Battery", capacity="90", status="Charging")])
    PowerSupply(on_mains=True, battery=0.9)
    >>> read_supply([])
    PowerSupply(on_mains=None, battery=None)
    """
    ours = [entry for entry in entries if _word(entry.scope) != "device"]
    plugs = [integer(entry.online) for entry in ours if _word(entry.kind) in _OUTER]
    known = [online for online in plugs if online is not None]
    batteries = [entry for entry in ours if _word(entry.kind) in _BATTERIES]
    states = {_word(entry.status) for entry in batteries}
    charges = [charge for entry in batteries if (charge := _charge(entry.capacity)) is not None]
    on_mains: bool | None = None
    if any(online > 0 for online in known) or states & _FED_FROM_OUTSIDE:
        on_mains = True
    elif known or "discharging" in states:
        on_mains = False
    return PowerSupply(on_mains, sum(charges) / len(charges) if charges else None)


def power_supply(root: Path = HERE) -> PowerSupply:
    """Return the state of this device's power supply.

    Parameters
    ----------
    root : Path
        Folder that contains ``sys``.

    Examples
    --------
    >>> power_supply(Path("/nowhere"))
    PowerSupply(on_mains=None, battery=None)
    """
    return read_supply(
        [
            SupplyEntry(
                kind=text_in(folder / "type"),
                online=text_in(folder / "online"),
                capacity=text_in(folder / "capacity"),
                status=text_in(folder / "status"),
                scope=text_in(folder / "scope"),
            )
            for folder in matching(root, "sys/class/power_supply/*")
        ]
    )
