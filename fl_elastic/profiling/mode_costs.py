"""What each group costs in other modes than full, as plain values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import ProfileError
from fl_elastic.groups import Mode

__all__ = ["ModeCosts"]


@dataclass(frozen=True, eq=False)
class ModeCosts:
    """Seconds of each group in other modes than full, relative to training it whole.

    Attributes
    ----------
    modes : tuple of Mode
        The K modes.
    update_ratio, path_ratio : array, shape (N, K)
        Own gradient (with what the forward pass takes longer), and way of the error gradient through the group,
        over those of the exact gradient; NaN where a mode does not apply to a group.
    """

    modes: tuple[Mode, ...]
    update_ratio: NDArray[np.float64]
    path_ratio: NDArray[np.float64]

    def __post_init__(self) -> None:
        for name in ("update_ratio", "path_ratio"):
            ratios = getattr(self, name)
            if ratios.ndim != 2 or ratios.shape[1] != len(self.modes):
                raise ProfileError(f"{name} has shape {ratios.shape}, not one column per mode")
            if np.less(ratios, 0, where=np.isfinite(ratios), out=np.zeros_like(ratios, bool)).any():
                raise ProfileError(f"{name} holds a negative cost")

    def column(self, mode: Mode) -> int | None:
        """Return the column of ``mode``, None if it was not measured."""
        return self.modes.index(mode) if mode in self.modes else None
