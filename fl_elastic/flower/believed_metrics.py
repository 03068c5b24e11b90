"""Which metrics of a client are believed, and which are left out: NaN, texts, names that cannot be shown."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from itertools import islice
from typing import Any

from fl_elastic.errors import UpdateError

_LOG = logging.getLogger("fl_elastic")
# Bounds: number of metrics, length of a name; how many of those left out are named, and how much of each name.
_MOST, _LONGEST, _NAMED, _SHOWN = 256, 200, 5, 60
# Prefix of what clients and servers of the library tell each other.
_OWN = "fl_elastic."
# Texts of a fit's report and of a device's capabilities.
_TEXTS = ("based-on", "device", "group-costs")
_BEYOND = 1e308


def believed_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    r"""Return the finite numbers among metrics, at most 256, with printable names of at most 200 characters.

    See `left_out_of` for the others. A tracker that allows fewer characters in names has to replace them.

    Examples
    --------
    >>> believed_metrics({"loss": 0.5, "mAP_0.5:0.95": 1, "bad\nname": 3, "x": float("nan"), "ok": True})
    {'loss': 0.5, 'mAP_0.5:0.95': 1}
    """
    good = (name for name, value in metrics.items() if not _fault(name, value))
    return {name: metrics[name] for name in islice(good, _MOST)}


def left_out_of(metrics: Mapping[str, Any]) -> str:
    r"""Return which of a client's metrics are left out, and why; empty if none is.

    Examples
    --------
    >>> left_out_of({"loss": 0.5, "bad\nname": 3, "note": "hello", "fl_elastic.have": 4})
    "'bad\\nname' (no name that can be shown), 'note' (no finite number)"
    """
    faults = [
        (name, fault)
        for name, value in metrics.items()
        if not _is_own(name) and (fault := _fault(name, value))
    ]
    beyond = sum(not _fault(name, value) for name, value in metrics.items()) - _MOST
    said = [f"{str(name)[:_SHOWN]!r} ({fault})" for name, fault in faults[:_NAMED]]
    if len(faults) > _NAMED:
        said.append(f"{len(faults) - _NAMED} more")
    if beyond > 0:
        said.append(f"{beyond} beyond the first {_MOST}")
    return ", ".join(said)


def refuse_metrics(metrics: Mapping[str, Any]) -> None:
    """Raise UpdateError if a server would leave out some of these metrics."""
    own = [name for name in metrics if name.startswith(_OWN)]
    left = left_out_of(metrics) or ", ".join(
        f"{name[:_SHOWN]!r} (the library's own)" for name in own
    )
    if left:
        raise UpdateError(
            f"metrics that no server would keep: {left}. Give finite numbers under at most {_MOST} names, of at "
            f"most {_LONGEST} printable characters"
        )


def warn_of_left_out(metrics: Mapping[str, Any]) -> None:
    """Log the metrics that a server will not believe."""
    left = left_out_of(metrics)
    if left:
        _LOG.warning("the server will leave metrics out: %s", left)


def _is_own(name: object) -> bool:
    """Return whether the library itself adds this entry to a reply; such an entry is not a metric of the user."""
    return str(name).startswith(_OWN) or name in _TEXTS


def _fault(name: object, value: object) -> str:
    """Return what is wrong with a metric; empty if nothing is."""
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST or not name.isprintable():
        return "no name that can be shown"
    if name.startswith(_OWN):
        return "the library's own"
    return "" if _is_number(value) else "no finite number"


def _is_number(value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return -_BEYOND <= value <= _BEYOND and math.isfinite(value)
