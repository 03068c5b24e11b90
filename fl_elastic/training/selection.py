"""Keep the scores that decide what is trained, from probe to probe and from round to round."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from fl_elastic.importance.base import Scores
from fl_elastic.training.options import TrainerOptions

__all__ = ["SelectionState"]

_LONGEST_GAP = 8


@dataclass
class SelectionState:
    """Smoothed importance and how long each group has been left out; survives from fit to fit.

    Attributes
    ----------
    names : tuple of str
        Groups in backward order; scores of another model are dropped.
    scores : list of float
        Moving average of importance, each probe scaled to a largest absolute score of 1.
    left_out : list of int
        Fits since each group was last trained.
    steps_since_probe, probe_gap : int
        Steps taken since the last probe, and after how many the next one is due.
    known : bool
        Whether earlier fits are remembered; without a memory nobody can say what was left out.
    """

    names: tuple[str, ...] = ()
    scores: list[float] = field(default_factory=list)
    left_out: list[int] = field(default_factory=list)
    steps_since_probe: int = 0
    probe_gap: int = 0
    known: bool = True

    def fit_to(self, names: Sequence[str]) -> None:
        """Start afresh if the groups are not the ones remembered."""
        if self.names != tuple(names):
            self.names = tuple(names)
            self.scores = []
            self.left_out = [0] * len(names)
            self.steps_since_probe = self.probe_gap = 0

    def probe_due(self) -> bool:
        """Whether importance must be measured before the next selection."""
        return not self.scores or self.steps_since_probe >= self.probe_gap

    def absorb(self, scores: Scores, options: TrainerOptions) -> bool:
        """Take in a new probe; return whether importance has drifted (always for the first)."""
        largest = float(np.abs(scores).max(initial=0.0))
        new = scores / largest if largest > 0 else scores
        self.steps_since_probe = 0
        if not self.scores:
            self.scores, self.probe_gap = new.tolist(), options.reselect_every
            return True
        old = np.array(self.scores)
        norms = float(np.linalg.norm(old) * np.linalg.norm(new))
        drifted = norms == 0 or float(old @ new) / norms < options.drift
        longest = options.reselect_every * _LONGEST_GAP
        self.probe_gap = options.reselect_every if drifted else min(2 * self.probe_gap, longest)
        keep = options.smoothing
        self.scores = (keep * old + (1 - keep) * new).tolist()
        return drifted

    def worth(self, options: TrainerOptions, sizes: ArrayLike) -> Scores:
        """Return what the policy sees: the share of importance, and the bonus for being left out.

        Without scores of its own the fleet's count in full; without either, the bonus alone, or each group's size
        if there is none.

        Parameters
        ----------
        options : TrainerOptions
            Gives the weight of the bonus.
        sizes : array-like, shape (N,)
            Weights per group: the bonus grows with a group's share of them, and with its mere presence.
        """
        scores = np.array(self.scores or np.zeros(len(self.names))).clip(min=0.0)
        total = scores.sum()
        shares = scores / total if total > 0 else scores
        if options.fleet_importance:
            blend = options.blend if total > 0 else 1.0
            others = np.array([options.fleet_importance.get(name, 0.0) for name in self.names])
            shares = (1 - blend) * shares + blend * others
        presence = (1.0 / len(scores) + np.asarray(sizes, dtype=float) / np.sum(sizes)) / 2
        turns = 1.0 + np.array(self.left_out, dtype=float)
        worth: Scores = shares + options.exploration * presence * turns
        return worth if worth.any() else presence

    def deep_due(self, options: TrainerOptions, generator: np.random.Generator) -> bool:
        """Draw whether this fit trains every group; certain once one was left out for too long."""
        if options.deep_every == 1:
            return True
        if options.deep_every == 0 or (self.known and not any(self.left_out)):
            return False
        overdue = max(self.left_out, default=0) >= 2 * options.deep_every
        return bool(generator.random() < 1 / options.deep_every) or overdue

    def trained(self, mask: Sequence[bool]) -> None:
        """Count one fit in which the groups in ``mask`` were trained."""
        self.known = True
        self.left_out = [
            0 if on else left + 1 for on, left in zip(mask, self.left_out, strict=True)
        ]

    def to_json(self) -> str:
        """Return the state as JSON text."""
        return json.dumps({name: value for name, value in asdict(self).items() if name != "known"})

    @classmethod
    def from_json(cls, text: str) -> SelectionState:
        """Read what `to_json` wrote; anything else gives a fresh state, since it is only a memory."""
        try:
            fields = json.loads(text)
            state = cls(
                names=tuple(str(name) for name in fields["names"]),
                scores=[float(score) for score in fields["scores"]],
                left_out=[int(count) for count in fields["left_out"]],
                steps_since_probe=int(fields["steps_since_probe"]),
                probe_gap=int(fields["probe_gap"]),
            )
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return cls()
        return state if state._is_possible() else cls()

    def _is_possible(self) -> bool:
        """Whether lengths and counts are such as `absorb` and `trained` leave behind."""
        lengths_fit = len(self.left_out) == len(self.names)
        lengths_fit &= len(self.scores) in (0, len(self.names))
        lowest_gap = 1 if self.scores else 0
        counts_fit = min([self.steps_since_probe, *self.left_out]) >= 0
        counts_fit &= self.probe_gap >= lowest_gap
        return lengths_fit and counts_fit and bool(np.isfinite(self.scores).all())
