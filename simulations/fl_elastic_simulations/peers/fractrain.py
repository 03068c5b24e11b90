"""Training steps with few bits, more of them from turning point to turning point (FracTrain's progressive part).

Bits are faked: values are rounded to as many levels as there would be, and stay 32 bits wide. A processor gains
nothing from it. It shows what the rounding costs in accuracy, and what operations weighed by their bits would be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_elastic_simulations.peers.base import LocalResult, LocalTask, Peer, register_peer
from fl_elastic_simulations.peers.masked import train_mask
from fl_elastic_simulations.peers.turning_points import TurningPoints

__all__ = [
    "FracTrain",
    "bit_cost",
    "few_bit_layers",
    "kept_points",
    "note_points",
    "quantised",
    "round_forward",
    "rounded",
]

# The documented command of the published code; weights stay as they are.
_FORWARD_BITS, _GRADIENT_BITS = (3, 4, 6, 8), (6, 6, 8, 8)
_LEAST_SCALE = 1e-8
_WHOLE = 32


def rounded(values: Tensor, bits: int, *, stochastic: bool = False) -> Tensor:
    """Return values on 2**bits levels from the least to the greatest.

    Parameters
    ----------
    values : Tensor
        Of any shape; one scale for all.
    bits : int
        At least 1.
    stochastic : bool
        Whether to round up or down at random, so that the mean is kept; to the nearest otherwise.

    Examples
    --------
    >>> rounded(torch.tensor([0.0, 0.4, 1.0, 3.0]), 2).tolist()
    [0.0, 0.0, 1.0, 3.0]
    """
    least = values.amin()
    scale = ((values.amax() - least) / (2**bits - 1)).clamp(min=_LEAST_SCALE)
    levels = (values - least) / scale
    if stochastic:
        levels = levels + torch.rand_like(levels) - 0.5
    found: Tensor = levels.round().clamp(0, 2**bits - 1) * scale + least
    return found


def bit_cost(forward_bits: int, gradient_bits: int) -> float:
    """Return what a step costs in operations weighed by their bits, over one in 32 bits.

    Activations times activations forward, and gradients times them twice backward.

    >>> bit_cost(32, 32), bit_cost(8, 8), round(bit_cost(3, 6), 4)
    (1.0, 0.0625, 0.0146)
    """
    return (forward_bits**2 + 2 * forward_bits * gradient_bits) / (3 * _WHOLE**2)


class _Straight(torch.autograd.Function):
    """Rounds forward, and lets gradients pass as they are."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, bits: int) -> Tensor:
        del ctx
        return rounded(values, bits)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        del ctx
        return gradients[0], None


def round_forward(values: Tensor, bits: int) -> Tensor:
    """Return values rounded as `rounded` does; gradients pass as if they were not."""
    found: Tensor = _Straight.apply(values, bits)
    return found


def few_bit_layers(model: nn.Module) -> Sequence[tuple[str, nn.Module]]:
    """Return names and layers that may run on few bits: all convolutions and linear layers but first and last."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear)
    ][1:-1]


class _Backward(torch.autograd.Function):
    """Lets values pass as they are, and rounds gradients at random."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, bits: int) -> Tensor:
        ctx.bits = bits
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return rounded(gradients[0], ctx.bits, stochastic=True), None


@contextmanager
def quantised(model: nn.Module, forward_bits: int, gradient_bits: int) -> Iterator[list[str]]:
    """Run convolutions and linear layers on few bits inside the block; yield their names.

    What enters them has ``forward_bits``, the error at their outputs ``gradient_bits``. The first and the last such
    layer stay as they are, as in the published code.

    Parameters
    ----------
    model : nn.Module
        As it was behind the block.
    forward_bits, gradient_bits : int
        At least 1.
    """
    layers = few_bit_layers(model)
    handles = []
    for _, layer in layers:
        handles += [
            layer.register_forward_pre_hook(
                lambda _, given: (round_forward(given[0], forward_bits), *given[1:])
            ),
            layer.register_forward_hook(lambda _, __, out: _Backward.apply(out, gradient_bits)),
        ]
    try:
        yield [name for name, _ in layers]
    finally:
        for handle in handles:
            handle.remove()


@register_peer("fractrain")
class FracTrain(Peer):
    """Train everything on few bits, and on more once the client's loss has levelled off.

    FracTrain (Fu et al., NeurIPS 2020), its progressive part without the gates: stages of 3, 4, 6 and 8 bits for
    activations and 6, 6, 8 and 8 for gradients, with the turning points of the published code, where a round is
    what an epoch is there. Each client goes by the loss of its own rounds. In as many steps as the time allows, at
    the time of steps in 32 bits: a processor is not faster on fewer.
    """

    rule = "contributors"
    weighting = "examples"

    def local_training(self, task: LocalTask) -> LocalResult:
        """Train everything on the bits of the client's stage."""
        points = kept_points(task, self.name, len(_FORWARD_BITS))
        stage = points.stage
        with quantised(task.model, _FORWARD_BITS[stage], _GRADIENT_BITS[stage]):
            result = train_mask(task, self.name, np.ones(len(task.profile), dtype=bool))
        note_points(task, self.name, points, result.loss)
        return result


def kept_points(task: LocalTask, name: str, stages: int) -> TurningPoints:
    """Return how far a client has come, by its notes of the peer with this name."""
    points = TurningPoints(stages)
    known = task.memory.get(name) or points.to_arrays()
    points.from_arrays({key: np.array(each, dtype=np.float64) for key, each in known.items()})
    return points


def note_points(task: LocalTask, name: str, points: TurningPoints, loss: float) -> None:
    """Take in a round's loss, and note how far the client has come."""
    points.observe(loss)
    task.memory[name] = {key: each.tolist() for key, each in points.to_arrays().items()}
