"""A frozen batch norm in eval mode, which is a scale and a shift per channel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from fl_elastic.groups.torch_private import BatchNorm
from fl_elastic.ops.autograd import apply_function, once_differentiable


def is_frozen_norm(norm: BatchNorm) -> bool:
    """Return whether ``norm`` is only a scale and a shift: in eval mode, with running statistics, not trained."""
    frozen = not any(parameter.requires_grad for parameter in norm.parameters())
    return frozen and not norm.training and norm.running_mean is not None


def norm_scale(variance: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """Return the factor per channel of a batch norm in eval mode, ``weight / sqrt(variance + epsilon)``."""
    scale = torch.rsqrt(variance + epsilon)
    return scale if weight is None else scale * weight.detach()


def frozen_batch_norm(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    epsilon: float,
) -> Tensor:
    """Return the output of a batch norm in eval mode that keeps one float per channel for the backward pass.

    Parameters
    ----------
    x : Tensor
        ``[N, C, ...]``; the only argument that gets a gradient.
    mean, variance : Tensor
        Running statistics, ``[C]``.
    weight, bias : Tensor or None
        Affine pair, ``[C]``.
    epsilon : float
        Added to the variance.
    """
    return apply_function(_FrozenBatchNorm, x, mean, variance, weight, bias, epsilon)


class _FrozenBatchNorm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mean: Tensor,
        variance: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        epsilon: float,
    ) -> Tensor:
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(norm_scale(variance, weight, epsilon))
        return functional.batch_norm(x, mean, variance, weight, bias, False, 0.0, epsilon)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = ctx.saved_tensors
        per_channel = scale.view(-1, *(1,) * (gradient.dim() - 2))
        return gradient * per_channel, None, None, None, None, None
