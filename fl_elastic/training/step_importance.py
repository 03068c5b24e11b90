"""Importance from the gradients of steps that are taken for training anyway."""

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

_TELLING = 2
# Number of weights whose change is computed at once. The change of a whole big layer would need new memory, which
# takes longer than the step; parts fit the cache.
_PART = 1 << 18


class StepImportance:
    r"""Reads the importance of the trained groups from two consecutive training steps.

    :math:`I_k = -\langle g_k(B),\ \Delta w_k(A)\rangle`, where :math:`\Delta w_k(A)` is the change of group k in
    the fit's first step, on batch A, and g is the gradient of the next step, on batch B. This is
    `ElasticImportance` of those two batches without an extra pass: the weights before the fit are kept anyway, and
    only one product per tensor remains.

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
        """Read the gradients of a step, before the optimiser takes it.

        Parameters
        ----------
        whole : iterable of int
            Indices of the groups that the step trains in full.
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
                # Read already, or not used by these batches; then a step does not change the loss.
                self._scores[index] = np.nan_to_num(self._scores[index])

    def scores(self) -> Scores:
        """Return the scores read since the last call, shape (N,); NaN for a group without any."""
        found = self._scores.copy()
        self._scores[:] = np.nan
        return found


@torch.no_grad()
def _along(gradient: Tensor, now: Tensor, before: Tensor) -> float:
    """Return the sum of gradient times change, computed in parts."""
    tensors = [each if each.dim() else each[None] for each in (gradient, now, before)]
    rows = max(_PART // max(now[:1].numel() if now.dim() else 1, 1), 1)
    parts = zip(*(torch.split(each, rows) for each in tensors), strict=True)
    sums = [torch.sum((w - b.to(w)).mul_(g), dtype=torch.float32) for g, w, b in parts]
    return float(torch.stack(sums).sum())
