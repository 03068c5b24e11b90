"""Chains of convolution, frozen norm and rectifier, whose filtered gradients can stay on patches."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from fl_elastic.methods.gradient_filter.operation import filtered_conv2d
from fl_elastic.methods.gradient_filter.patches import CellGrid
from fl_elastic.ops.activations import relu, relu6
from fl_elastic.ops.geometry import ConvGeometry, Pair
from fl_elastic.ops.norm import frozen_batch_norm, norm_scale


@dataclass(frozen=True)
class PatchUnit:
    """A convolution with the norm and rectifier after it.

    Attributes
    ----------
    conv : nn.Conv2d
        Trained with filtered gradients, or frozen.
    norm : nn.BatchNorm2d or None
        Frozen and in eval mode.
    activation : nn.ReLU or nn.ReLU6 or None
        The rectifier at the end.
    """

    conv: nn.Conv2d
    norm: nn.BatchNorm2d | None = None
    activation: nn.ReLU | nn.ReLU6 | None = None

    @property
    def geometry(self) -> ConvGeometry:
        """How the kernel slides."""
        geometry = ConvGeometry.of(self.conv)
        assert geometry is not None
        return geometry

    @property
    def is_capped(self) -> bool:
        """Whether the rectifier is also closed from 6 on."""
        return isinstance(self.activation, nn.ReLU6)

    def scale(self) -> Tensor | None:
        """Return the norm's factor per channel; None without a norm."""
        if self.norm is None:
            return None
        assert self.norm.running_var is not None
        return norm_scale(self.norm.running_var, self.norm.weight, self.norm.eps)

    def finish(self, y: Tensor) -> Tensor:
        """Return ``y``, the output of the convolution, after norm and activation, without gradients."""
        if self.norm is not None:
            norm = self.norm
            y = functional.batch_norm(
                y, norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.0, norm.eps
            )
        if self.activation is not None:
            y = functional.relu6(y, inplace=True) if self.is_capped else y.relu_()
        return y


@dataclass(frozen=True)
class PatchChain:
    """Consecutive units with the same patch side.

    A convolution pads with zeros, equally on both sides, and a 1 x 1 one has no stride: otherwise its gradient is
    not constant on patches. Norms are frozen.
    """

    units: tuple[PatchUnit, ...]
    patch: int

    def parameters(self) -> list[Tensor | None]:
        """Return weight and bias of every convolution in order."""
        return [own for unit in self.units for own in (unit.conv.weight, unit.conv.bias)]

    def fits(self, size: Pair) -> bool:
        """Return whether the chain can take maps of ``size``: every pixel lies in a cell of every unit."""
        for unit in self.units:
            grid = CellGrid.of(unit.geometry, size, self.patch)
            if not (grid.rows.is_whole and grid.columns.is_whole):
                return False
            size = unit.geometry.output_size(size)
        return True

    def op_by_op(self, x: Tensor) -> Tensor:
        """Return the output of the chain with each operation run separately, on full-size gradients."""
        for unit in self.units:
            x = filtered_conv2d(
                x, unit.conv.weight, unit.conv.bias, unit.geometry, self.patch, filters_input=True
            )
            if (norm := unit.norm) is not None:
                assert norm.running_mean is not None and norm.running_var is not None
                x = frozen_batch_norm(
                    x, norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.eps
                )
            if unit.activation is not None:
                x = relu6(x) if unit.is_capped else relu(x)
        return x
