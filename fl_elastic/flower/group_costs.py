"""What each tensor group costs on one device, as it tells the server."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from itertools import chain

import numpy as np

from fl_elastic.errors import UpdateError
from fl_elastic.profiling import CostProfile

__all__ = ["GroupCosts"]

_MOST_GROUPS = 100_000
_LONGEST_NAME = 500
_LONGEST_TEXT = 1 << 22
_MOST = 1e15


@dataclass(frozen=True)
class GroupCosts:
    """Costs of one training step by tensor group; tuples are in backward order.

    Attributes
    ----------
    names : tuple of str
        Groups.
    update_seconds, path_seconds : tuple of float
        As in `CostProfile`.
    sent_bytes : tuple of float
        Size of each group's weights as fp32.
    constant_seconds : float
        What every step takes, whatever is trained.
    head : int
        Index of the group that is always trained.
    """

    names: tuple[str, ...]
    update_seconds: tuple[float, ...]
    path_seconds: tuple[float, ...]
    sent_bytes: tuple[float, ...]
    constant_seconds: float
    head: int

    @classmethod
    def of(cls, profile: CostProfile) -> GroupCosts:
        """Return the costs of a profile."""
        return cls(
            names=profile.group_names,
            update_seconds=tuple(profile.update_seconds.tolist()),
            path_seconds=tuple(profile.path_seconds.tolist()),
            sent_bytes=tuple(profile.parameter_bytes.tolist()),
            constant_seconds=float(profile.forward_seconds[0]) + profile.fixed_seconds,
            head=int(profile.graph.head),
        )

    def slowed(self, slowdown: float) -> GroupCosts:
        """Return the costs of a device that is so many times slower."""
        return replace(
            self,
            update_seconds=tuple(slowdown * each for each in self.update_seconds),
            path_seconds=tuple(slowdown * each for each in self.path_seconds),
            constant_seconds=slowdown * self.constant_seconds,
        )

    def to_json(self) -> str:
        """Return the costs as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: object) -> GroupCosts:
        """Read what `to_json` wrote; raises UpdateError for anything else."""
        try:
            if not isinstance(text, str):
                raise TypeError("not text")
            if len(text) > _LONGEST_TEXT:
                raise ValueError(f"{len(text)} characters, at most {_LONGEST_TEXT} are read")
            fields = json.loads(text)
            found = cls(
                names=tuple(str(name) for name in fields["names"]),
                update_seconds=tuple(float(each) for each in fields["update_seconds"]),
                path_seconds=tuple(float(each) for each in fields["path_seconds"]),
                sent_bytes=tuple(float(each) for each in fields["sent_bytes"]),
                constant_seconds=float(fields["constant_seconds"]),
                head=int(fields["head"]),
            )
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise UpdateError(f"costs of groups cannot be read: {str(error)[:80]}") from None
        found._check()
        return found

    def _check(self) -> None:
        count = len(self.names)
        columns = (self.update_seconds, self.path_seconds, self.sent_bytes)
        fits = 0 < count <= _MOST_GROUPS and 0 <= self.head < count
        fits &= all(len(column) == count for column in columns)
        distinct = len(set(self.names)) == count
        short = all(len(name) <= _LONGEST_NAME for name in self.names)
        numbers = np.array([*chain(*columns), self.constant_seconds])
        if not (fits and distinct and short and ((numbers >= 0) & (numbers <= _MOST)).all()):
            raise UpdateError(
                f"costs of {count} groups are not one name and three numbers from 0 for each"
            )
