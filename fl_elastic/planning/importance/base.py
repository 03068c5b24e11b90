"""The interface of importance scores, and their registry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fl_elastic.groups import Batch, LossFn, TensorGroup
from fl_elastic.registry import Factories

Scores = NDArray[np.float64]


@dataclass(frozen=True)
class Probe:
    """The inputs of a score, which must leave them unchanged.

    Attributes
    ----------
    model : nn.Module
        The model at its current weights.
    loss_fn : callable
        ``loss_fn(outputs, targets)``.
    groups : sequence of TensorGroup
        In backward order.
    batches : sequence of batch
        Independent batches, as many as the score's ``batches_needed``.
    shadow_optimizer : callable
        ``shadow_optimizer(parameters)`` returns a copy of the real optimiser, with its state, that
        drives other tensors of the same shapes.
    generator : numpy.random.Generator
        The only source of randomness.
    found : dict
        Channel scores computed on this probe, by class, so that scores of groups and of channels can share one
        pass.
    """

    model: nn.Module
    loss_fn: LossFn
    groups: Sequence[TensorGroup]
    batches: Sequence[Batch]
    shadow_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    generator: np.random.Generator
    found: dict[type, Any] = field(default_factory=dict, compare=False)


class Importance(ABC):
    """Scores tensor groups by the expected loss decrease if a group is trained, or by a substitute for it.

    Attributes
    ----------
    batches_needed : int
        Number of batches of a probe.
    read_from_steps : bool
        Whether the score can be computed from consecutive training steps, see
        `fl_elastic.training.step.StepImportance`.
    by_example : bool
        Whether a probe passes each example through the model separately.
    """

    batches_needed: int = 0
    read_from_steps: bool = False
    by_example: bool = False

    @abstractmethod
    def score(self, probe: Probe) -> Scores:
        """Return one finite number per group, shape (N,); larger means more important."""


_OWN = {
    "elastic": "elastic",
    "elastic_same_batch": "elastic",
    "fisher": "channel_scores",
}

IMPORTANCES: Factories[Importance] = Factories(
    "importance",
    modules={name: f"fl_elastic.planning.importance.{module}" for name, module in _OWN.items()},
)
"""Registry of importance scores by name."""
