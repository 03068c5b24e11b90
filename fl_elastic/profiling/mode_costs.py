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

    def ratios(self, group: int, mode: Mode) -> tuple[float, float] | None:
        """Return the ratios of own gradient and way of a group in ``mode``; None if nothing tells them.

        A share of channels that was not measured lies on the line between the nearest that were; above the largest
        the other end is the whole group, below the smallest it costs as much as that.

        Examples
        --------
        >>> costs = ModeCosts((Mode.channels(1 / 2),), np.array([[0.6]]), np.ones((1, 1)))
        >>> costs.ratios(0, Mode.channels(3 / 4)), costs.ratios(0, Mode.channels(1 / 4)), costs.ratios(0, Mode.BIAS)
        ((0.8, 1.0), (0.6, 1.0), None)
        """
        column = self.column(mode)
        if column is not None:
            found = float(self.update_ratio[group, column]), float(self.path_ratio[group, column])
            return found if np.isfinite(found[0]) else None
        if mode.kind != "channels":
            return None
        measured = sorted(
            (each.fraction, self.update_ratio[group, c], self.path_ratio[group, c])
            for c, each in enumerate(self.modes)
            if (each.kind, each.axis) == ("channels", mode.axis)
            and np.isfinite(self.update_ratio[group, c])
        )
        if not measured:
            return None
        shares, own, way = zip(*measured, (1.0, 1.0, 1.0), strict=True)
        return float(np.interp(mode.fraction, shares, own)), float(
            np.interp(mode.fraction, shares, way)
        )
