"""Windows of channels: neighbouring units of each inner width that a step runs and trains, and where they start."""

from __future__ import annotations

import math
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

__all__ = ["Every", "Windows", "kept_units", "window_starts"]

Every = Literal["step", "fit"]


@dataclass(frozen=True)
class Windows(StepTransform):
    """Of which units of some widths a step consists.

    Attributes
    ----------
    widths : tuple of Width
        Which widths; all other channels are whole.
    rate : float
        Share of the units that a window keeps, in (0, 1].
    every : {"step", "fit"}
        How long a start holds.
    seed : int
        Of what is drawn.

    Raises
    ------
    PlanError
        If one of them is impossible.
    """

    widths: tuple[Width, ...]
    rate: float
    every: Every = "step"
    seed: int = 0
    runs_part: ClassVar[bool] = True
    opens_steps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise PlanError(f"keep-rate {self.rate} must be above 0 and at most 1")
        if self.every not in ("step", "fit"):
            raise PlanError(f"windows are drawn every 'step' or every 'fit', not {self.every!r}")

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
        generator = np.random.default_rng([self.seed, 0 if self.every == "fit" else step])
        return {
            width.name: int(generator.choice(window_starts(width.size, self.length(width))))
            for width in self.widths
        }


def window_starts(size: int, length: int) -> NDArray[np.int64]:
    """Return the starts that a window may have: the fewest by which all units are held equally often.

    They are all equally likely. A window goes on at the first unit after the last; where its length divides the
    size, none does.

    Parameters
    ----------
    size, length : int
        Units there are, and units that a window keeps.

    Examples
    --------
    >>> window_starts(6, 4).tolist(), window_starts(6, 3).tolist()
    ([0, 2, 4], [0, 3])
    """
    if length >= size:
        return np.zeros(1, dtype=np.int64)
    return np.arange(0, size, math.gcd(size, length))


def kept_units(size: int, length: int, start: int) -> NDArray[np.int64]:
    """Return the units of a window, first to last in its own order.

    Examples
    --------
    >>> kept_units(6, 4, 3).tolist()
    [3, 4, 5, 0]
    """
    return (start + np.arange(length)) % size
