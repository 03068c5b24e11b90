"""Add up the rows of a last layer into the sums for a head, with some examples held out in folds."""

from __future__ import annotations

from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_elastic.closed_form.folds import FOLDS, Fold
from fl_elastic.closed_form.head_sums import HeadSums
from fl_elastic.errors import TrainingError
from fl_elastic.groups.model_state import ModelState
from fl_elastic.training.last_layer import COMPUTED, LastLayer, LayerRows
from fl_elastic.training.loader import NO_BATCH
from fl_elastic.training.sums_size import held_out

NONE_COUNTS = "no target counts: the class of every target is ignored"
"""Error message for data without a target that counts."""
# Rows that are collected before a product is computed, and most rows of one product.
_AT_ONCE, _MOST_AT_ONCE = 256, 4096
# If inputs have many rows each, at least this many inputs are held out, each reduced to rows with the same sums.
_INPUTS = 20
_Kept: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]


class GatheredSums:
    """Sums of products over the examples that are not held out, computed for many examples at a time.

    With few examples at a time, writing the D x D sums would take longer than computing the products.
    """

    def __init__(self) -> None:
        self._kind: tuple[LastLayer, bool] | None = None
        self._waiting: list[tuple[Tensor, Tensor, Tensor]] = []
        self._sums: tuple[NDArray[np.float64], ...] | None = None
        # The features' mean in the first batch. Sums about it are not rounded by the size of a constant feature.
        self._origin = torch.zeros(0, dtype=torch.float64)
        self._held = _HeldOut()

    def add(self, rows: LayerRows, keys: list[int]) -> None:
        """Add the rows of a batch, with a key for each input."""
        kind = rows.layer, rows.classes
        if self._kind not in (None, kind):
            raise TrainingError(
                "a head in closed form needs one last layer and one kind of target for all batches"
            )
        self._kind = kind
        own = torch.tensor(keys, dtype=torch.int64)[rows.inputs]
        # Not every device supports double precision.
        self._waiting.append((rows.features.cpu(), rows.wanted, own))
        if sum(len(each) for each, *_ in self._waiting) >= _AT_ONCE:
            self._add_up()

    def sums(self, model: nn.Module, together: int, *, empty: bool = False) -> HeadSums:
        """Return the sums over all batches; raise TrainingError if there was none, or none with an example."""
        if self._waiting:
            self._add_up()
        if self._sums is None or self._kind is None:
            raise TrainingError(NO_BATCH)
        names = ModelState.of(model).names
        layer, classes = self._kind
        own = {id(each) for each in model.parameters()} & names.keys()
        if not all(tensor is None or id(tensor) in own for tensor in (layer.weight, layer.bias)):
            raise TrainingError(COMPUTED)
        self._move_back()
        products, targets, squares = self._sums
        folds = self._held.folds(together)
        weight = names[id(layer.weight)][0]
        found = HeadSums(weight, products, targets, squares, classes, folds)
        held = (part for fold in folds for part in (fold.rows, fold.targets))
        # A number that is not finite makes its row of the products so, the constant's column included.
        if not all(np.isfinite(array).all() for array in (products[-1], targets, squares, *held)):
            raise TrainingError(
                "the input of the last layer, or a target, is not finite: check the data for NaN, and the "
                "learning rate"
            )
        if not found.num_examples and not empty:
            raise TrainingError(NONE_COUNTS)
        return found

    def _add_up(self) -> None:
        together = (torch.cat(each) for each in zip(*self._waiting, strict=True))
        self._waiting = []
        for given, wanted, keys in zip(
            *(torch.split(each, _MOST_AT_ONCE) for each in together), strict=True
        ):
            rows = nn.functional.pad(given.double(), (0, 1), value=1.0)
            if self._sums is None:
                few, many = wanted.shape[1], rows.shape[1]
                # NumPy's zeros take no memory before they are written to.
                self._sums = np.zeros((many, many)), np.zeros((many, few)), np.zeros(few)
                self._origin = rows.mean(dim=0)
                self._origin[-1] = 0.0
            rows, wanted, squares, _ = self._held.exchange(rows, wanted, wanted**2, keys)
            if not len(rows):
                continue
            rows.addr_(rows[:, -1].clone(), self._origin, alpha=-1.0)
            products, targets, squared = map(torch.from_numpy, self._sums)
            # Added in place: with many features, one more matrix of products is as large as a model.
            products.addmm_(rows.T, rows)
            targets.addmm_(rows.T, wanted)
            squared.add_(squares.sum(dim=0))

    def _move_back(self) -> None:
        """Turn the sums about the origin into those about zero, in place, once."""
        assert self._sums is not None
        products, targets, _ = map(torch.from_numpy, self._sums)
        # Without an example beside those held out, nothing is written: the zeros take no memory.
        if float(products[-1, -1]):
            products.addr_(products[:, -1].clone(), self._origin)
            products.addr_(self._origin, products[-1].clone())
            targets.addr_(self._origin, targets[-1].clone())
        self._origin = torch.zeros_like(self._origin)


class _HeldOut:
    """Chooses the held-out examples: those with the smallest keys.

    Therefore they are the same in every pass and order, and equal examples are held out together. An input with
    more rows than features is reduced to fewer rows with the same sums.
    """

    def __init__(self) -> None:
        self._kept: _Kept | None = None
        self._below: int | None = None

    def exchange(self, rows: Tensor, wanted: Tensor, squares: Tensor, keys: Tensor) -> _Kept:
        """Add rows, whose last feature is the constant 1; return all rows that are not held out, or no longer."""
        new: _Kept = rows, wanted, squares, keys
        small = torch.ones_like(keys, dtype=torch.bool)
        if self._below is not None:
            small = keys < self._below
        left, new = _where(~small, new), _where(small, new)
        kept = new if self._kept is None else _together(self._kept, new)
        features = rows.shape[1] - 1
        found, counts = torch.unique(kept[-1], return_counts=True)
        for key in found[counts > features + 1].tolist():
            kept = _together(_where(kept[-1] != key, kept), _factor(_where(kept[-1] == key, kept)))
        found, counts = torch.unique(kept[-1], return_counts=True)
        fits = int((counts.cumsum(0) <= held_out(features)).sum())
        stay = max(fits, min(_INPUTS, len(found))) if counts.numel() else 0
        if stay < len(found):
            self._below = int(found[stay])
            left = _together(left, _where(kept[-1] >= self._below, kept))
            kept = _where(kept[-1] < self._below, kept)
        self._kept = kept
        return left

    def folds(self, together: int) -> tuple[Fold, ...]:
        """Return up to five folds of about equal size, fewer if they would have fewer than ``together`` inputs."""
        assert self._kept is not None
        order = self._kept[-1].argsort(stable=True)
        rows, goals, squares, keys = (each[order] for each in self._kept)
        counts = torch.unique_consecutive(keys, return_counts=True)[1]
        ends = counts.cumsum(0).tolist()
        parts = max(min(FOLDS, len(ends) // max(together, 1)), 1)
        # A fold ends between unequal examples, as close as possible to where a fold of equal size would end.
        wished = [len(keys) * number / parts for number in range(1, parts + 1)]
        bounds = sorted(
            {0, *(min(ends, key=lambda end: abs(end - wish)) for wish in wished if ends)}
        )
        return tuple(
            Fold(rows[i:j].numpy(), goals[i:j].numpy(), squares[i:j].sum(dim=0).numpy())
            for i, j in pairwise(bounds)
        )


def _where(which: Tensor, kept: _Kept) -> _Kept:
    rows, wanted, squares, keys = kept
    return rows[which], wanted[which], squares[which], keys[which]


def _together(one: _Kept, other: _Kept) -> _Kept:
    rows, wanted, squares, keys = map(torch.cat, zip(one, other, strict=True))
    return rows, wanted, squares, keys


def _factor(kept: _Kept) -> _Kept:
    """Return the fewest rows of one input that have the same products."""
    turn, rows = torch.linalg.qr(kept[0])
    squares = torch.zeros(len(rows), kept[2].shape[1], dtype=kept[2].dtype)
    squares[0] = kept[2].sum(dim=0)
    return rows, turn.T @ kept[1], squares, kept[3][: len(rows)]
