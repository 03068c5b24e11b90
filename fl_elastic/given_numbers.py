"""Numbers as users give them: of Python, of numpy, or tensors."""

from __future__ import annotations

import operator
from numbers import Real
from typing import Any

__all__ = ["is_real", "whole"]


def whole(value: Any) -> int | None:
    """Return a whole number as an int; None for anything else: a part of one, text, or a truth value.

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


def is_real(value: object) -> bool:
    """Return whether this is a real number, of Python or of numpy, and no truth value.

    Examples
    --------
    >>> import numpy as np
    >>> is_real(1.5), is_real(np.float32(1.5)), is_real("1.5"), is_real(True), is_real(None)
    (True, True, False, False, False)
    """
    return isinstance(value, Real) and not isinstance(value, bool)
