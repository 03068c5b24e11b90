"""Seconds that a simulated client was charged for choosing, kept from round to round."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from fl_elastic.state.files import write_atomically


@dataclass
class Charges:
    """Charged seconds of one device, over all its fits of a run.

    Attributes
    ----------
    fits : int
        Number of charged fits; the first one pays for the cost profile.
    profile_seconds, choosing_seconds : float
        Seconds for the cost profile, and for plans and probes.
    lost_seconds : float
        Part of these seconds that belongs to fits without an update.
    """

    fits: int = 0
    profile_seconds: float = 0.0
    choosing_seconds: float = 0.0
    lost_seconds: float = 0.0

    def add(self, profile_seconds: float, choosing_seconds: float, *, lost: bool) -> None:
        """Add a fit."""
        self.fits += 1
        self.profile_seconds += profile_seconds
        self.choosing_seconds += choosing_seconds
        self.lost_seconds += profile_seconds + choosing_seconds if lost else 0.0

    def save(self, path: Path) -> None:
        """Write the charges to a file."""
        write_atomically(path, json.dumps(asdict(self)).encode(), durable=False)

    @classmethod
    def load(cls, path: Path) -> Charges:
        """Read a file written by `save`; without a file nothing has been charged."""
        return cls(**json.loads(path.read_text())) if path.exists() else cls()

    @classmethod
    def sum(cls, each: Iterable[Charges]) -> Charges:
        """Return the sum of several clients' charges.

        >>> Charges.sum([Charges(1, 2.0), Charges(3, 0.0, 4.0)])
        Charges(fits=4, profile_seconds=2.0, choosing_seconds=4.0, lost_seconds=0.0)
        """
        every = list(each)
        names = [field.name for field in fields(cls)]
        return cls(**{name: sum(getattr(charges, name) for charges in every) for name in names})
