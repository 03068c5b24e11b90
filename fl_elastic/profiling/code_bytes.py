"""Bytes of code that a process loads for its first steps."""

from __future__ import annotations

CODE_BYTES = 24e6
"""Bytes of torch and its operations that a process on Linux loads or creates for its first steps: 13 to 26 MB."""
KERNEL_BYTES = 2.5e6
"""Bytes that a later fit loads in addition, for kinds of layers not trained before: 1.3 to 3.1 MB."""
_SMALL, _SLOPE = 2e6, 6.0

_has_trained = False


def code_to_load() -> float:
    """Return the bytes of code that this process has yet to load for training; few after its first step."""
    return KERNEL_BYTES if _has_trained else CODE_BYTES


def code_is_loaded() -> None:
    """Note that this process has taken a training step."""
    global _has_trained
    _has_trained = True


def with_code(tensors: float, code: float) -> float:
    """Return the bytes of tensors and code together: no code up to 2 MB of tensors, all of it from 6 MB on.

    In the steps of small models code would outweigh everything else, and budgets would say nothing about the model.

    Examples
    --------
    >>> [with_code(1e6 * tensors, CODE_BYTES) / 1e6 for tensors in (1, 3, 50)]
    [1.0, 9.0, 74.0]
    >>> with_code(3e6, 0.0) / 1e6
    3.0
    """
    return tensors + min(max(_SLOPE * (tensors - _SMALL), 0.0), code)
