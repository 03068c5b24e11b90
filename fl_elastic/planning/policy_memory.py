"""What a policy itself remembers from fit to fit, stored with the selection's state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from fl_elastic.errors import PlanError

__all__ = ["MOST_BYTES", "PolicyMemory"]

MOST_BYTES = 32 << 20
"""Bound on the bytes of the arrays of one memory, which is written to disk after every fit."""
_KINDS = "fiub"


@dataclass(frozen=True, eq=False)
class PolicyMemory:
    """Facts and arrays of one policy; empty before its first fit.

    Attributes
    ----------
    owner : str
        The policy that it belongs to: another policy starts with an empty memory.
    facts : mapping of str to value
        Values that JSON can represent.
    arrays : mapping of str to array
        Real numbers, at most `MOST_BYTES` together.

    Raises
    ------
    PlanError
        If the arrays are larger, or hold something else.

    Examples
    --------
    >>> import numpy as np
    >>> memory = PolicyMemory("mine", {"round": 3}, {"seen": np.ones(2, np.float16)})
    >>> memory.of("mine").nbytes, memory.of("another").nbytes
    (4, 0)
    """

    owner: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, array in self.arrays.items():
            if array.dtype.kind not in _KINDS:
                raise PlanError(f"array {name!r} of a policy's memory has type {array.dtype}")
        if self.nbytes > MOST_BYTES:
            raise PlanError(
                f"policy {self.owner!r} would keep {self.nbytes} bytes from fit to fit, at most {MOST_BYTES} are "
                "allowed: keep less of them"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    def of(self, owner: str) -> PolicyMemory:
        """Return this memory if it is ``owner``'s, else an empty one."""
        return self if self.owner == owner else PolicyMemory(owner)
