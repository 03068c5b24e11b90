"""Linear layers that train a part of their weight, and keep only the input of that part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from fl_elastic.groups.mode import Axis
from fl_elastic.groups.torch_private import no_view
from fl_elastic.ops.autograd import apply_function, once_differentiable
from fl_elastic.ops.channels import checked_channels


@dataclass(frozen=True)
class FeatureSubset:
    """The trained input or output features of a linear layer, as an index vector."""

    axis: Axis
    index: Tensor

    @classmethod
    def of(cls, features: Sequence[int], axis: Axis, weight_shape: Sequence[int]) -> FeatureSubset:
        """Return the subset of ``features``; raise PlanError if it is empty, or one is repeated or out of range."""
        count = weight_shape[1] if axis == "in" else weight_shape[0]
        return cls(axis, torch.tensor(checked_channels(features, count)))


def bias_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the output of a linear layer that trains only its bias and does not keep ``x`` ``[..., Ci]``."""
    return apply_function(_Linear, x, weight, bias, None)


def channel_linear(x: Tensor, weight: Tensor, bias: Tensor | None, subset: FeatureSubset) -> Tensor:
    """Return the output of a linear layer in which only the weights of ``subset`` get a gradient.

    The gradient has the shape of the whole weight and is zero elsewhere; input and bias gradient are exact.

    Parameters
    ----------
    x : Tensor
        ``[..., Ci]``.
    weight : Tensor
        ``[Co, Ci]``.
    bias : Tensor or None
        ``[Co]``.
    subset : FeatureSubset
        The trained features.
    """
    return apply_function(_Linear, x, weight, bias, subset)


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, subset: FeatureSubset | None
    ) -> Tensor:
        kept = None
        if subset is not None and ctx.needs_input_grad[1]:
            index = subset.index.to(x.device)
            kept = x.index_select(-1, index) if subset.axis == "in" else x
        ctx.save_for_backward(weight, kept)
        ctx.subset = subset
        # For more than two dimensions torch returns a view, which must not be written.
        return no_view(functional.linear(x, weight, bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight, kept = ctx.saved_tensors
        of_input = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_input = gradient @ weight
        rows = gradient.reshape(-1, gradient.shape[-1])
        if kept is not None:
            index = ctx.subset.index.to(gradient.device)
            of_weight = torch.zeros_like(weight)
            columns = kept.reshape(-1, kept.shape[-1])
            if ctx.subset.axis == "in":
                of_weight[:, index] = rows.t() @ columns
            else:
                of_weight[index] = rows.index_select(1, index).t() @ columns
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0)
        return of_input, of_weight, of_bias, None
