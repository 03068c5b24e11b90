"""Which tensors changed at which version: what a server may leave out of its next message."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.update.partial import MAX_VERSION

__all__ = ["ChangeLog"]

Weights = Mapping[str, NDArray[Any]]


class ChangeLog:
    """For each tensor of the global model, the version at which it last changed.

    Versions before the first recorded one are unknown; record the initial model as a change from nothing to
    make it known.

    Examples
    --------
    >>> first = {"a": np.zeros(2), "b": np.zeros(2)}
    >>> log = ChangeLog()
    >>> log.record(0, {}, first)
    >>> log.record(1, first, first | {"b": np.ones(2)})
    >>> log.since(0), log.since(1), log.since(2)
    (frozenset({'b'}), frozenset(), None)
    """

    def __init__(self) -> None:
        self._versions: list[int] = []
        self._changed: dict[str, int] = {}

    def record(self, version: int, old: Weights, new: Weights) -> None:
        """Note which tensors differ, bit for bit, between the last recorded model and that of ``version``.

        A version that is not above all recorded ones is another history (the server went back to a
        checkpoint): the log starts anew with it.
        """
        version = int(version)
        if self._versions and version <= self._versions[-1]:
            self._versions, self._changed = [], {}
        for name, array in new.items():
            if name not in old or not _same_bits(old[name], array):
                self._changed[name] = version
        self._versions.append(version)

    def amend(self, old: Weights, new: Weights) -> None:
        """Note what differs between two models under the last recorded version, of which nobody holds the first."""
        for name, array in new.items():
            if name not in old or not _same_bits(old[name], array):
                self._changed[name] = self._versions[-1]

    def since(self, version: int) -> frozenset[str] | None:
        """Return the tensors that changed after ``version``; None if the log does not know that version."""
        if version not in self._versions:
            return None
        return frozenset(name for name, at in self._changed.items() if at > version)

    def to_json(self) -> str:
        """Return the log as text for a checkpoint."""
        return json.dumps({"versions": self._versions, "changed": self._changed})

    @classmethod
    def from_json(cls, text: str) -> ChangeLog:
        """Read what `to_json` wrote; anything else gives an empty log: full models then go out again."""
        log = cls()
        try:
            fields = json.loads(text)
            versions, changed = fields["versions"], fields["changed"]
            if _is_possible(versions, changed):
                log._versions, log._changed = list(versions), dict(changed)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass
        return log


def _is_possible(versions: list[Any], changed: dict[str, Any]) -> bool:
    """Whether `ChangeLog.record` may have left these: increasing versions, changes at some of them."""
    counts = all(type(version) is int and 0 <= version <= MAX_VERSION for version in versions)
    return (
        counts
        and versions == sorted(set(versions))
        and all(type(at) is int and at in versions for at in changed.values())
    )


def _same_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    first, second = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (a, b))
    return bool(np.array_equal(first, second))
