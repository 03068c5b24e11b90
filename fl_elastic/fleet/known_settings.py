"""Settings of a node that fl_elastic knows, checked before a device finds out in the field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fl_elastic.errors import FleetError
from fl_elastic.fleet.inventory import Inventory
from fl_elastic.fleet.names import Scalar

__all__ = ["check_config"]


@dataclass(frozen=True)
class _Rule:
    expected: str
    fits: Callable[[Scalar], bool]


def _whole(lowest: int, highest: int = 2**31) -> Callable[[Scalar], bool]:
    return lambda v: isinstance(v, int) and not isinstance(v, bool) and lowest <= v <= highest


def _number(lowest: float) -> Callable[[Scalar], bool]:
    return lambda v: isinstance(v, (int, float)) and not isinstance(v, bool) and v >= lowest


def _is_text(value: Scalar) -> bool:
    return isinstance(value, str)


_KNOWN = {
    "partition-id": _Rule("a whole number from 0 on", _whole(0)),
    "threads": _Rule("a whole number, 0 to measure", _whole(0)),
    "runtime-port": _Rule("a whole number from 1 to 65535", _whole(1, 65535)),
    "deadline": _Rule("seconds, more than 0", _number(1e-9)),
    "speedup": _Rule("a number from 1 on", _number(1)),
    "state-dir": _Rule("the path of a folder", _is_text),
    "data-root": _Rule("the path of a folder", _is_text),
    "least-battery": _Rule("a charge from 0 to 1", lambda v: _number(0)(v) and float(v) <= 1),
    "mains-only": _Rule("true or false", lambda v: isinstance(v, bool)),
    "stream-state-dir": _Rule("the path of a learner's state folder", _is_text),
    "joining": _Rule("the name of a joining rule", _is_text),
}


def check_config(name: str, config: Mapping[str, Scalar], inventory: Inventory) -> None:
    """Return if the settings of a node make sense; a setting that is not known here is the app's.

    Parameters
    ----------
    name : str
        The node.
    config : mapping of str to bool, int, float or str
        All its settings.
    inventory : Inventory
        The fleet, in which no two nodes may have the same part of the data.

    Raises
    ------
    FleetError
        If a value is none that the setting can have, or another node has the partition.
    """
    for key, value in config.items():
        rule = _KNOWN.get(key)
        if rule is not None and not rule.fits(value):
            raise FleetError(f"{key}={value!r} of node {name}: expected {rule.expected}")
    for other in inventory.nodes:
        same = other.config.get("partition-id") == config.get("partition-id")
        if same and other.name != name and not other.revoked:
            raise FleetError(
                f"partition-id={config.get('partition-id')} of node {name}: {other.name} has it; "
                "give one of them another"
            )
