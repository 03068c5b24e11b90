"""Importance from the gradients of steps that train anyway."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_elastic.groups import TensorGroup
from fl_elastic.planning.importance.base import Scores

__all__ = ["StepImportance"]

_TELLING = 2
# Differences of a big layer as a whole are fresh memory that costs more than the step: a part fits into the cache.
_PART = 1 << 18


class StepImportance:
    r"""Reads the importance of what is trained from two consecutive training steps.

    :math:`I_k = -\langle g_k(B),\ \Delta w_k(A)\rangle`, with :math:`\Delta w_k(A)` what the first step of a fit on
    its batch A made of group k, and g the gradient of the next step on its batch B. This is `ElasticImportance` of
    those two batches, without a pass of its own: the weights before the fit are kept anyway, and what is left to do
    is one product per tensor.

    Parameters
    ----------
    model : nn.Module
        The model in training.
    before : callable
        ``before(parameter)`` returns its value at the start of the fit.
    groups : sequence of TensorGroup
        In backward order.
    """

    def __init__(
        self,
        model: nn.Module,
        before: Callable[[nn.Parameter], NDArray[Any]],
        groups: Sequence[TensorGroup],
    ) -> None:
        self._before = before
        known = dict(model.named_parameters(remove_duplicate=False))
        self._unread = [{name: known[name] for name in group.parameters} for group in groups]
        self._stepped: set[str] = set()
        self._steps: Counter[int] = Counter()
        self._scores = np.full(len(groups), np.nan)

    def observe(self, whole: Iterable[int]) -> None:
        """Look at the gradients of a step, before the optimiser takes it.

        Parameters
        ----------
        whole : iterable of int
            Groups that the step trains in all their weights, by their number.
        """
        for index in whole:
            unread, self._steps[index] = self._unread[index], self._steps[index] + 1
            for name, parameter in [*unread.items()]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                if name not in self._stepped:
                    self._stepped.add(name)
                    continue
                del unread[name]
                read = -_along(gradient, parameter, torch.as_tensor(self._before(parameter)))
                if math.isfinite(read):
                    self._scores[index] = np.nan_to_num(self._scores[index]) + read
            if self._steps[index] == _TELLING and self._stepped.isdisjoint(unread):
                # Read already, or of no use to these batches: then a step changes nothing.
                self._scores[index] = np.nan_to_num(self._scores[index])

    def scores(self) -> Scores:
        """Return what was read since this was last asked, NaN for a group of which nothing was; shape (N,)."""
        found = self._scores.copy()
        self._scores[:] = np.nan
        return found


@torch.no_grad()
def _along(gradient: Tensor, now: Tensor, before: Tensor) -> float:
    """Return the sum of gradient times change, taken part by part."""
    tensors = [each if each.dim() else each[None] for each in (gradient, now, before)]
    rows = max(_PART // max(now[:1].numel() if now.dim() else 1, 1), 1)
    parts = zip(*(torch.split(each, rows) for each in tensors), strict=True)
    sums = [torch.sum(g * (w - b.to(w)), dtype=torch.float32) for g, w, b in parts]
    return float(torch.stack(sums).sum())
