"""Windows of channels: neighbouring units of each inner width that a step runs and trains, and where they start."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import PlanError
from fl_elastic.groups.graph import Width
from fl_elastic.methods.windows.costs import narrow_profile
from fl_elastic.planning.transforms.base import StepCase, StepOpener, StepTransform

if TYPE_CHECKING:
    from torch import nn

    from fl_elastic.planning.plan import Plan

__all__ = ["PLACES", "Every", "Place", "Windows", "inclusion", "kept_units", "window_starts"]

Place = Literal["uniform", "grid", "wrap"]
Every = Literal["step", "fit"]
PLACES: tuple[Place, ...] = ("uniform", "grid", "wrap")


@dataclass(frozen=True)
class Windows(StepTransform):
    """Of which units of some widths a step consists.

    One mechanism for several published methods, which differ in the start alone: drawn for each step (SliceOut,
    Notin et al. 2020), drawn for each fit (random windows of federated dropout), always the first units (HeteroFL,
    Diao et al. 2021: ``offset`` 0), or one further in every round (FedRolex, Alam et al. 2022: ``offset`` counts
    rounds).

    Attributes
    ----------
    widths : tuple of Width
        Which widths; all other channels are whole.
    rate : float
        Share of the units that a window keeps, in (0, 1].
    place : {"uniform", "grid", "wrap"}
        Where a window may start, see `window_starts`.
    every : {"step", "fit"}
        How long a start holds.
    offset : int, optional
        The unit at which every window starts, counted on from the first after the last; drawn if left out.
    seed : int
        Of what is drawn.

    Raises
    ------
    PlanError
        If one of them is impossible.
    """

    widths: tuple[Width, ...]
    rate: float
    place: Place = "grid"
    every: Every = "step"
    offset: int | None = None
    seed: int = 0
    runs_part: ClassVar[bool] = True
    opens_steps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise PlanError(f"keep-rate {self.rate} must be above 0 and at most 1")
        if self.place not in PLACES:
            raise PlanError(f"place {self.place!r} is unknown: use {', '.join(PLACES)}")
        if self.every not in ("step", "fit"):
            raise PlanError(f"windows are drawn every 'step' or every 'fit', not {self.every!r}")
        if self.offset is not None and self.offset < 0:
            raise PlanError(f"offset {self.offset} must not be negative")

    @property
    def lasts_a_fit(self) -> bool:
        """Whether what the windows hold is sent, so that later plans of a fit are the first one."""
        return self.every == "fit"

    def check(self, model: nn.Module, plan: Plan) -> None:
        """Raise PlanError: windows are opened for each step."""
        del model
        raise PlanError(
            f"policy {plan.policy!r} trains in windows of channels, which ElasticTrainer opens for each step: "
            "train with it, or by another policy"
        )

    def opener(self, model: nn.Module, before: StepOpener | None) -> StepOpener:
        """Return what opens a window for each step."""
        # Plans are made without it: only a fit loads what runs windows.
        from fl_elastic.methods.windows.steps import WindowSteps

        return WindowSteps(model, self, before if isinstance(before, WindowSteps) else None)

    def closing_passes(self, model: nn.Module, steps: int) -> int:
        """Return how many passes running statistics take."""
        from fl_elastic.methods.windows.steps import statistics_passes

        return statistics_passes(model, steps)

    def case(self, case: StepCase) -> StepCase:
        """Return the case of the narrow model."""
        kept = {width: self.length(width) for width in self.widths}
        return replace(case, profile=narrow_profile(case.profile, kept))

    def length(self, width: Width) -> int:
        """Return how many units of a width are kept: at least one.

        Examples
        --------
        >>> width = Width("a", 10, 1, ("a",), (), (), (), ())
        >>> [Windows((width,), rate).length(width) for rate in (1.0, 0.5, 0.25, 0.01)]
        [10, 5, 2, 1]
        """
        return max(1, round(width.size * self.rate))

    def share(self, width: Width) -> float:
        """Return the share of a width's units that are kept."""
        return self.length(width) / width.size

    def starts(self, step: int = 0) -> dict[str, int]:
        """Return the start of each width's window in a step of the fit."""
        if self.offset is not None:
            return {width.name: self.offset % width.size for width in self.widths}
        generator = np.random.default_rng([self.seed, 0 if self.every == "fit" else step])
        return {
            width.name: int(
                generator.choice(window_starts(width.size, self.length(width), self.place))
            )
            for width in self.widths
        }


def window_starts(size: int, length: int, place: Place = "grid") -> NDArray[np.int64]:
    """Return the starts that a window may have, all equally likely.

    Parameters
    ----------
    size, length : int
        Units there are, and units that a window keeps.
    place : {"uniform", "grid", "wrap"}
        Any start whose window ends within the units; or starts by which all units are held equally often, as a
        window goes on at the first unit after the last: the fewest (multiples of the length where it divides the
        size, so that no window wraps round), or every unit.

    Examples
    --------
    >>> [window_starts(6, 4, place).tolist() for place in PLACES]
    [[0, 1, 2], [0, 2, 4], [0, 1, 2, 3, 4, 5]]
    """
    if length >= size:
        return np.zeros(1, dtype=np.int64)
    if place == "uniform":
        return np.arange(size - length + 1)
    if place == "wrap":
        return np.arange(size)
    return np.arange(0, size, math.gcd(size, length))


def kept_units(size: int, length: int, start: int) -> NDArray[np.int64]:
    """Return the units of a window, first to last in its own order.

    Examples
    --------
    >>> kept_units(6, 4, 3).tolist()
    [3, 4, 5, 0]
    """
    return (start + np.arange(length)) % size


def inclusion(size: int, length: int, place: Place = "grid") -> NDArray[np.float64]:
    """Return the probability with which a window holds each unit, by going through all starts; shape (size,).

    With uniform starts units at the edges are held less often than those in the middle.

    Examples
    --------
    >>> inclusion(4, 2, "uniform").round(3).tolist(), inclusion(4, 2, "wrap").tolist()
    ([0.333, 0.667, 0.667, 0.333], [0.5, 0.5, 0.5, 0.5])
    """
    starts: Sequence[int] = window_starts(size, length, place).tolist()
    held = np.zeros(size)
    for start in starts:
        held[kept_units(size, length, start)] += 1
    return held / len(starts)
