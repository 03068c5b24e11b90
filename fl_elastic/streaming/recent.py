"""What a learner holds in memory of the newest samples; all of it survives a restart."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.streaming.guard import Guard, HeldOut, Row
from fl_elastic.streaming.intake import kept_label, label_of

__all__ = ["Recent"]


class Recent:
    """New samples to be trained on, those held out, and predictions whose label has not come.

    Parameters
    ----------
    guard : Guard
        Says what is held out.
    new : int
        Newest labelled samples that are kept for the next adaptation.
    waiting : int
        Predictions that are kept for a late label; the oldest are given up.
    """

    def __init__(self, guard: Guard, new: int, waiting: int) -> None:
        self._guard, self._waiting_bound = guard, waiting
        self.new: deque[Row] = deque(maxlen=new)
        self.held_out = HeldOut(guard)
        self._waiting: dict[int, int | None] = {}

    def wait(self, sample_id: int, prediction: int | None) -> None:
        """Keep a prediction until its label comes."""
        self._waiting[sample_id] = prediction
        while len(self._waiting) > self._waiting_bound:
            del self._waiting[next(iter(self._waiting))]

    def is_waited_for(self, sample_id: int) -> bool:
        """Whether the label of a sample has not come yet."""
        return sample_id in self._waiting

    @property
    def waiting(self) -> frozenset[int]:
        """The samples whose label has not come yet."""
        return frozenset(self._waiting)

    def answered(self, sample_id: int) -> int | None:
        """Return what was predicted of a sample whose label has come."""
        return self._waiting.pop(sample_id)

    def forget_samples(self) -> None:
        """Give up all samples: they are features of a frozen part that is no more."""
        self.new.clear()
        self.held_out.clear()

    def forget(self, numbers: Collection[int]) -> None:
        """Give up these samples, and what was predicted of them."""
        kept = [row for row in self.new if row.number not in numbers]
        self.new.clear()
        self.new.extend(kept)
        self.held_out.rows = [row for row in self.held_out.rows if row.number not in numbers]
        for number in numbers:
            self._waiting.pop(number, None)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return everything as arrays."""
        said = [kept_label(each) for each in self._waiting.values()]
        return {
            **_stacked("new", self.new),
            **_stacked("held", self.held_out.rows),
            "counted": np.array(self.held_out.counted, np.int64),
            "waiting": np.array([list(self._waiting), said], np.int64),
        }

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take over what `to_arrays` gave."""
        self.new.extend(_rows("new", arrays))
        self.held_out = HeldOut(self._guard, _rows("held", arrays), int(arrays["counted"]))
        for sample_id, said in arrays["waiting"].T.tolist():
            self.wait(sample_id, label_of(said))


def _stacked(name: str, rows: Sequence[Row]) -> dict[str, NDArray[Any]]:
    if not rows:
        return {}
    return {
        f"{name}.x": np.stack([row.x for row in rows]),
        f"{name}.y": np.array([row.y for row in rows], np.int64),
        f"{name}.t": np.array([row.t for row in rows], np.float64),
        f"{name}.n": np.array([row.number for row in rows], np.int64),
    }


def _rows(name: str, arrays: Mapping[str, NDArray[Any]]) -> list[Row]:
    if f"{name}.x" not in arrays:
        return []
    x, t = arrays[f"{name}.x"], arrays[f"{name}.t"].astype(np.float64)
    y = arrays[f"{name}.y"].astype(np.int64)
    n = arrays[f"{name}.n"].astype(np.int64)
    return [Row(*each) for each in zip(x, y.tolist(), t.tolist(), n.tolist(), strict=True)]
