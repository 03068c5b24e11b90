"""The importance scores by which groups are chosen, kept from probe to probe and from round to round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from fl_elastic.errors import PlanError
from fl_elastic.planning.importance.base import Scores
from fl_elastic.planning.request import NO_MEMORY, PolicyMemory
from fl_elastic.state.archive import Kind

# Largest gap between two probes, as a multiple of the usual one.
_LONGEST_GAP = 8
SELECTION = Kind("fl_elastic.selection", 2)
"""Kind of the archives that hold a `SelectionState`."""


@dataclass
class SelectionState:
    """Smoothed importance, and for how long each group was left out; kept from fit to fit.

    Attributes
    ----------
    names : tuple of str
        Groups in backward order; scores of another model are dropped.
    scores : list of float or None
        Moving average of importance, in the units of the newest score; None for a group that was never measured;
        empty if no group was.
    left_out : list of int
        Fits since each group was last trained.
    steps_since_probe, probe_gap : int
        Steps since all groups were last measured together, and the number of steps after which a probe is due.
    planning_seconds : float
        Time that making the last plan took; 0 if none was made.
    memory : PolicyMemory
        State of the policy itself.
    known : bool
        Whether earlier fits are remembered; otherwise it is unknown which groups were left out.

    Raises
    ------
    PlanError
        If the lengths differ, a count is negative, or a score is not finite.
    """

    probe_every: ClassVar[int] = 100
    """Steps between two probes. While importance stays similar the gap doubles, up to eight times this; after a
    drift it falls back. It is longer if a probe would take more than a hundredth of the time between two.
    """
    below_cosine: ClassVar[float] = 0.8
    """Groups are selected again if the cosine similarity of old and new importance is below this."""
    smoothing: ClassVar[float] = 0.5
    """Weight of the old score in the moving average over probes."""
    exploration: ClassVar[float] = 0.3
    """Weight of a bonus added to every group's share of the importance: its share of the weights (averaged with an
    equal share for each group), times one more than the number of fits since it was last trained. The bonus fills
    the budget if importance is lost in noise, and brings every affordable group back in turn.
    """

    names: tuple[str, ...] = ()
    scores: list[float | None] = field(default_factory=list)
    left_out: list[int] = field(default_factory=list)
    steps_since_probe: int = 0
    probe_gap: int = 0
    planning_seconds: float = 0.0
    memory: PolicyMemory = field(default=NO_MEMORY, compare=False)
    known: bool = True

    def __post_init__(self) -> None:
        lengths_fit = len(self.left_out) == len(self.names)
        lengths_fit &= len(self.scores) in (0, len(self.names))
        if not lengths_fit:
            raise PlanError(
                f"{len(self.scores)} scores and {len(self.left_out)} counts do not fit {len(self.names)} groups"
            )
        if min([self.steps_since_probe, self.probe_gap, *self.left_out]) < 0:
            raise PlanError("counts of steps and fits must not be negative")
        if not all(score is None or math.isfinite(score) for score in self.scores):
            raise PlanError("scores must be finite")
        if not 0.0 <= self.planning_seconds < math.inf:
            raise PlanError(f"planning_seconds {self.planning_seconds} is no time")

    def fit_to(self, names: Sequence[str]) -> None:
        """Drop everything remembered if the groups are not the remembered ones."""
        if self.names != tuple(names):
            self.names = tuple(names)
            self.scores = []
            self.left_out = [0] * len(names)
            self.steps_since_probe = self.probe_gap = 0
            self.memory = NO_MEMORY

    def probe_due(self) -> bool:
        """Whether importance must be measured before the next selection."""
        return not self.scores or self.steps_since_probe >= self.probe_gap

    @property
    def measured(self) -> Scores:
        """The scores, shape (N,); NaN for a group that was never measured."""
        return np.array(self.scores or [None] * len(self.names), dtype=float)

    @property
    def remembers(self) -> bool:
        """Whether there are scores from earlier rounds, or anything else that a policy could use."""
        looked_at = self.scores or self.memory.owner or self.planning_seconds
        return bool(looked_at or any(self.left_out))

    @property
    def complete(self) -> bool:
        """Whether every group has been measured at some time."""
        return bool(self.scores) and None not in self.scores

    def absorb(self, scores: Scores, *, together: bool = True) -> bool:
        """Merge new scores; return whether importance has drifted (always true for the first).

        Parameters
        ----------
        scores : ndarray, shape (N,)
            NaN for a group that was not measured, which keeps its old score.
        together : bool
            Whether all groups that can be trained were measured at once, as a probe does.
        """
        new, old = np.asarray(scores, dtype=float), self.measured
        now, both = np.isfinite(new), np.isfinite(new) & np.isfinite(old)
        if not now.any():
            return False
        norms = float(np.linalg.norm(old[both]) * np.linalg.norm(new[both]))
        drifted = norms == 0 or float(old[both] @ new[both]) / norms < self.below_cosine
        if not self.scores or together:
            longest = self.probe_every * _LONGEST_GAP
            go_on = bool(self.scores) and not drifted
            self.probe_gap = min(2 * self.probe_gap, longest) if go_on else self.probe_every
        if together:
            self.steps_since_probe = 0
        if together and norms > 0:
            # The gain of a step falls while the model learns, so old scores are rescaled to the size of the new
            # ones.
            old = old * (np.abs(new[both]).max() / np.abs(old[both]).max())
        keep = self.smoothing
        merged = np.where(both, keep * old + (1 - keep) * new, np.where(now, new, old))
        self.scores = [float(each) if np.isfinite(each) else None for each in merged]
        return drifted

    def worth(self, sizes: ArrayLike) -> Scores:
        """Return the groups' worth as the policy sees it: share of importance plus the bonus for being left out.

        Without scores only the bonus counts. A group that was never measured is given importance in proportion to
        its size.

        Parameters
        ----------
        sizes : array-like, shape (N,)
            Weights per group: the bonus grows with a group's share of them, besides an equal share per group.
        """
        presence = (1.0 / len(self.names) + np.asarray(sizes, dtype=float) / np.sum(sizes)) / 2
        scores = self.measured.clip(min=0.0)
        known = np.isfinite(scores)
        total = scores[known].sum()
        if total > 0:
            scores[~known] = presence[~known] * (total / presence[known].sum())
            total = scores.sum()
        shares = scores / total if total > 0 else np.zeros(len(scores))
        turns = 1.0 + np.array(self.left_out, dtype=float)
        worth: Scores = shares + self.exploration * presence * turns
        return worth

    def draw_full_update(self, every: int, generator: np.random.Generator) -> bool:
        """Draw whether a fit trains every group, with probability 1/``every``; certain after twice as many fits."""
        if every == 1:
            return True
        if every == 0 or (self.known and not any(self.left_out)):
            return False
        overdue = max(self.left_out, default=0) >= 2 * every
        return bool(generator.random() < 1 / every) or overdue

    def trained(self, mask: Sequence[bool]) -> None:
        """Count one fit in which the groups in ``mask`` were trained."""
        self.known = True
        self.left_out = [
            0 if on else left + 1 for on, left in zip(mask, self.left_out, strict=True)
        ]
