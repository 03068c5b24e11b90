"""The interface of operations that a method provides for a kind of mode, and their registry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from fl_elastic.groups.mode import Mode
from fl_elastic.registry import Factories

if TYPE_CHECKING:
    from fl_elastic.ops.geometry import ConvGeometry
    from fl_elastic.ops.lean_forward import LeanForward


class ModeOperation(ABC):
    """How two-dimensional convolutions are trained in modes of one kind."""

    @abstractmethod
    def forward(self, module: nn.Conv2d, geometry: ConvGeometry, mode: Mode) -> LeanForward:
        """Return the forward function of a convolution that is trained in ``mode``."""

    @abstractmethod
    def kept_numbers(self, given: Sequence[int], output: Sequence[int], mode: Mode) -> float:
        """Return how many numbers a layer with this input and output shape keeps for the backward pass."""


OPERATIONS: Factories[ModeOperation] = Factories("operation", listed_as="operations")
"""Registry of operations by the kind of mode."""
