"""Which metrics of a client are kept: finite numbers, not too many, under short plain names that stay apart."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["believed_metrics"]

_MOST = 64
_PLAIN = re.compile(r"[A-Za-z0-9_.\- /]{1,80}")
_ODD = re.compile(r"[^A-Za-z0-9_]")
_BEYOND = 1e308


def believed_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    r"""Return the first 64 finite numbers with a plain name of at most 80 characters.

    Of names that a monitor would take for one, as ``a.b`` and ``a_b``, the first is kept. What is not kept is not
    the training's: nothing else of the reply changes.

    Examples
    --------
    >>> believed_metrics({"loss": 0.5, "a.b": 1, "a_b": 2, "bad\nname": 3, "x": float("nan"), "ok": True})
    {'loss': 0.5, 'a.b': 1}
    """
    kept: dict[str, Any] = {}
    shown: set[str] = set()
    for name, value in metrics.items():
        if len(kept) == _MOST:
            break
        if not _is_number(value) or not _PLAIN.fullmatch(name):
            continue
        plain = _ODD.sub("_", name)
        if plain not in shown:
            shown.add(plain)
            kept[name] = value
    return kept


def _is_number(value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return -_BEYOND <= value <= _BEYOND and math.isfinite(value)
