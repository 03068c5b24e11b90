"""Checks of settings that users give: numbers of Python, numpy or torch, and objects of a class."""

from __future__ import annotations

import operator
from numbers import Real
from typing import Any, TypeGuard


def whole(value: Any) -> int | None:
    """Return a whole number as an int; None for anything else, such as a fraction, text or a bool.

    Examples
    --------
    >>> import numpy as np
    >>> whole(np.uint8(3)), whole(2.0), whole(1.7), whole("3"), whole(True), whole(float("nan"))
    (3, 2, None, None, None, None)
    """
    if isinstance(value, bool):
        return None
    try:
        if is_real(value):
            return int(value) if value == int(value) else None
        return operator.index(value)
    except (TypeError, ValueError, OverflowError):
        return None


def is_real(value: object) -> TypeGuard[float]:
    """Return whether a value is a real number, of Python or of numpy; a bool is not.

    Examples
    --------
    >>> import numpy as np
    >>> is_real(1.5), is_real(np.float32(1.5)), is_real("1.5"), is_real(True), is_real(None)
    (True, True, False, False, False)
    """
    return isinstance(value, Real) and not isinstance(value, bool)


def of_another_kind(**settings: tuple[object, Any]) -> str:
    """Return an error message for the first setting that is neither None nor of its class; empty if there is none.

    Examples
    --------
    >>> of_another_kind(rows=(3, int), name=(None, str), rate=("high", float))
    "rate 'high' is no float: give an object of that kind"
    >>> of_another_kind(rows=(3, int))
    ''
    """
    for name, (given, kind) in settings.items():
        if given is not None and (not isinstance(given, kind) or isinstance(given, type)):
            return f"{name} {given!r} is no {kind.__name__}: give an object of that kind"
    return ""
