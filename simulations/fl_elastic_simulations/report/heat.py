"""The heat maps of coverage as plain values: rounds across, groups down, one per device class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fl_elastic_simulations.report.figures import drawn_text
from fl_elastic_simulations.report.formats import abbreviated
from fl_elastic_simulations.report.palette import ink
from fl_elastic_simulations.report.summary import DeviceClass, Method, Results, Shares

__all__ = ["Heat", "coverage_heat", "transposed"]

_MOST_TICKS = 16


@dataclass(frozen=True)
class Heat:
    """All heat maps of the page.

    Parameters
    ----------
    methods : tuple of int
        Positions of the methods that have coverage.
    chosen : int
        Position of the method that is shown first.
    devices : tuple of DeviceClass
        One panel each.
    values : mapping
        What the page's script draws.
    height : int
        Pixels of one panel.
    """

    methods: tuple[int, ...]
    chosen: int
    devices: tuple[DeviceClass, ...]
    values: Mapping[str, object]
    height: int


def coverage_heat(results: Results) -> Heat | None:
    """Return the heat maps, or nothing where no method has coverage.

    The method shown first is the last one that is not ``full``, if there is one.
    """
    covered = [
        position for position, method in enumerate(results.methods) if any(method.coverage.values())
    ]
    devices = tuple(
        device
        for device in results.devices
        if any(method.coverage.get(device.name) for method in results.methods)
    )
    if not covered:
        return None
    chosen = [position for position in covered if results.methods[position].name != "full"]
    groups, rounds = _extent(results)
    names = [*results.groups, *(f"group {index}" for index in range(len(results.groups), groups))]
    every = -(-groups // _MOST_TICKS)
    ticks = list(range(0, groups, every))
    return Heat(
        methods=tuple(covered),
        chosen=chosen[-1] if chosen else covered[-1],
        devices=devices,
        values={
            "groups": [drawn_text(name) for name in names],
            "tickvals": ticks,
            "ticktext": [drawn_text(abbreviated(names[index])) for index in ticks],
            "rounds": rounds,
            "shares": [_panels(method, devices, rounds, groups) for method in results.methods],
            "colours": [ink(position).colour for position in range(len(results.methods))],
        },
        height=min(max(72 + 16 * groups, 170), 420),
    )


def transposed(shares: Shares, rounds: int, groups: int) -> list[list[float | None]]:
    """Turn rounds x groups into groups x rounds; what is not there is ``None``.

    >>> transposed(((0.0, 1.0), (0.5,)), rounds=3, groups=2)
    [[0.0, 0.5, None], [1.0, None, None]]
    """
    return [[_share(shares, index, group) for index in range(rounds)] for group in range(groups)]


def _share(shares: Shares, index: int, group: int) -> float | None:
    if index >= len(shares) or group >= len(shares[index]):
        return None
    share = shares[index][group]
    # Three decimals: a colour cannot show more, and the page stays small.
    return None if share is None else round(share, 3)


def _panels(
    method: Method, devices: Sequence[DeviceClass], rounds: int, groups: int
) -> list[list[list[float | None]]]:
    return [transposed(method.coverage.get(device.name, ()), rounds, groups) for device in devices]


def _extent(results: Results) -> tuple[int, int]:
    """Return the largest number of groups and of rounds of any coverage."""
    tables = [shares for method in results.methods for shares in method.coverage.values()]
    groups = max((len(row) for shares in tables for row in shares), default=0)
    return max(groups, len(results.groups)), max((len(shares) for shares in tables), default=0)
