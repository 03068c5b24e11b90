"""Forward functions of single modules that keep only the tensors that a mode needs for the backward pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from fl_elastic.errors import PlanError
from fl_elastic.groups.batch import map_tensors
from fl_elastic.groups.mode import Mode
from fl_elastic.groups.torch_private import BatchNorm, own_parameters
from fl_elastic.ops.activations import hardswish, relu, relu6
from fl_elastic.ops.channels import ChannelSubset
from fl_elastic.ops.convolution import channel_conv2d, frozen_conv2d
from fl_elastic.ops.geometry import ConvGeometry, Pair
from fl_elastic.ops.linear import FeatureSubset, bias_linear, channel_linear
from fl_elastic.ops.mode_operation import OPERATIONS
from fl_elastic.ops.norm import frozen_batch_norm, is_frozen_norm
from fl_elastic.ops.pooling import MOST_PIXELS, MOST_TAPS, max_pool2d


def lean_forward(
    module: nn.Module, mode: Mode, channels: Sequence[int] | None = None
) -> LeanForward | None:
    """Return a forward function of ``module`` with the same output that keeps only what ``mode`` needs.

    Parameters
    ----------
    module : nn.Module
        Conv2d, Linear, BatchNorm, LSTM, ReLU, ReLU6, Hardswish or MaxPool2d.
    mode : Mode
        How its parameters are trained. Activations and pooling are the same in every mode.
    channels : sequence of int, optional
        The trained input or output channels; required by mode ``channels``.

    Returns
    -------
    LeanForward or None
        None if plain PyTorch keeps no more: for a fully trained layer, a frozen Linear, and a BatchNorm that is
        trained or in training mode. None also if there is no exact replacement: for any other class, a subclass
        with its own forward, a layer whose weights are computed (parametrised, pruned), a convolution that pads
        with anything but zeros or unequally, a max pooling with dilation, ``ceil_mode`` or more than 256 taps, or
        that returns indices.

    Raises
    ------
    PlanError
        If the channels are missing, empty, out of range or listed twice.

    Notes
    -----
    A call falls back to the ``forward`` of the module's class if gradients are disabled, under
    autocast, and for inputs that are not floating-point batches.
    """
    for kind, make in _MAKERS:
        if (
            isinstance(module, kind)
            and type(module).forward is kind.forward
            and owns_weights(module)
        ):
            return make(module, mode, channels)
    return None


def owns_weights(module: nn.Module) -> bool:
    """Return whether weight and bias, if any, are parameters of the module itself.

    This is false if a parametrisation (weight or spectral norm), pruning or a hook computes them.
    """
    if not isinstance(module, nn.Conv2d | nn.Linear | BatchNorm):
        return True
    # Reading the attribute would compute it, which updates the vectors of a spectral norm.
    return all(name in own_parameters(module) for name in ("weight", "bias"))


@dataclass(frozen=True)
class LeanForward(ABC):
    """Base of the replacements that are called instead of ``module.forward``.

    A replacement refers to its module, so that in a deep copy of a model it refers to the copied module.
    """

    module: nn.Module

    def __call__(self, x: Tensor) -> Tensor:
        """Return the module's output for ``x``."""
        if _applies(x) and self.fits(x):
            return self.run(x)
        output: Tensor = type(self.module).forward(self.module, x)
        return output

    def fits(self, x: Tensor) -> bool:
        """Return whether the replacement applies to ``x``, a floating-point tensor with gradients switched on."""
        del x
        return True

    @abstractmethod
    def run(self, x: Tensor) -> Tensor:
        """Return the output, computed by the replacement."""


def has_foreign_forward(module: nn.Module) -> bool:
    """Return whether other code has set a ``forward`` on this module instance, which must not be replaced."""
    return not isinstance(module.__dict__.get("forward"), LeanForward | None)


def _applies(x: Tensor) -> bool:
    return (
        isinstance(x, Tensor)
        and torch.is_grad_enabled()
        and x.is_floating_point()
        and not torch.is_autocast_enabled(x.device.type)
    )


@dataclass(frozen=True)
class ConvForward(LeanForward):
    """Base of the replacements of two-dimensional convolutions."""

    module: nn.Conv2d
    mode: Mode
    geometry: ConvGeometry

    def fits(self, x: Tensor) -> bool:
        """Return whether the input or a parameter needs a gradient."""
        parameters = self.module.weight, self.module.bias
        return x.dim() == 4 and (
            x.requires_grad or any(p is not None and p.requires_grad for p in parameters)
        )


@dataclass(frozen=True)
class _Conv(ConvForward):
    subset: ChannelSubset | None = field(default=None, compare=False)

    def run(self, x: Tensor) -> Tensor:
        weight, bias = self.module.weight, self.module.bias
        if self.subset is not None:
            return channel_conv2d(x, weight, bias, self.geometry, self.subset)
        trains_bias = self.mode.kind == "bias"
        return frozen_conv2d(x, weight, bias, self.geometry, trains_bias=trains_bias)


@dataclass(frozen=True)
class _Linear(LeanForward):
    module: nn.Linear
    subset: FeatureSubset | None = field(default=None, compare=False)

    def run(self, x: Tensor) -> Tensor:
        if self.subset is None:
            return bias_linear(x, self.module.weight, self.module.bias)
        return channel_linear(x, self.module.weight, self.module.bias, self.subset)


@dataclass(frozen=True)
class _Norm(LeanForward):
    module: BatchNorm

    def fits(self, x: Tensor) -> bool:
        dimensions = {nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,)}
        allowed = next((d for kind, d in dimensions.items() if isinstance(self.module, kind)), ())
        return x.requires_grad and x.dim() in allowed and is_frozen_norm(self.module)

    def run(self, x: Tensor) -> Tensor:
        norm = self.module
        assert norm.running_mean is not None and norm.running_var is not None
        return frozen_batch_norm(
            x, norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.eps
        )


@dataclass(frozen=True)
class _Activation(LeanForward):
    module: nn.ReLU | nn.ReLU6 | nn.Hardswish

    def fits(self, x: Tensor) -> bool:
        return x.requires_grad

    def run(self, x: Tensor) -> Tensor:
        activation = {nn.ReLU: relu, nn.ReLU6: relu6, nn.Hardswish: hardswish}
        function = next(f for kind, f in activation.items() if isinstance(self.module, kind))
        return function(x, inplace=self.module.inplace)


@dataclass(frozen=True)
class _MaxPool(LeanForward):
    module: nn.MaxPool2d
    window: tuple[Pair, Pair, Pair]

    def fits(self, x: Tensor) -> bool:
        return x.requires_grad and x.dim() == 4 and x.shape[2] * x.shape[3] < MOST_PIXELS

    def run(self, x: Tensor) -> Tensor:
        return max_pool2d(x, *self.window)


@dataclass(frozen=True)
class _Lstm(LeanForward):
    """Runs a frozen LSTM as inference if nothing needs its gradient.

    Otherwise torch on CPUs fills a workspace for the backward pass, several times as large as the output, that is
    never read.
    """

    module: nn.LSTM

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Return the module's output for a tensor or a packed sequence, with or without a state."""
        needed = [parameter.requires_grad for parameter in self.module.parameters()]

        def note(tensor: Tensor) -> Tensor:
            needed.append(tensor.requires_grad)
            return tensor

        map_tensors(note, [*given, *named.values()])
        with nullcontext() if any(needed) else torch.no_grad():
            return nn.LSTM.forward(self.module, *given, **named)

    def run(self, x: Tensor) -> Tensor:
        """Return the outputs of all steps."""
        outputs: Tensor = self(x)[0]
        return outputs


def _lstm(module: nn.Module, mode: Mode, channels: Sequence[int] | None) -> LeanForward | None:
    del channels
    assert isinstance(module, nn.LSTM)
    return _Lstm(module) if mode.kind == "frozen" else None


def _conv(module: nn.Module, mode: Mode, channels: Sequence[int] | None) -> LeanForward | None:
    assert isinstance(module, nn.Conv2d)
    subset = None
    if mode.kind == "channels":
        shape = module.weight.shape
        subset = ChannelSubset.of(_listed(mode, channels), mode.axis, shape, module.groups)
    geometry = ConvGeometry.of(module)
    if geometry is None or mode.kind == "full":
        return None
    if mode.kind in ("frozen", "bias", "channels"):
        return _Conv(module, mode, geometry, subset)
    return OPERATIONS.make(mode.kind).forward(module, geometry, mode)


def _linear(module: nn.Module, mode: Mode, channels: Sequence[int] | None) -> LeanForward | None:
    assert isinstance(module, nn.Linear)
    if mode.kind == "channels":
        shape = module.weight.shape
        return _Linear(module, FeatureSubset.of(_listed(mode, channels), mode.axis, shape))
    return _Linear(module) if mode.kind == "bias" else None


def _norm(module: nn.Module, mode: Mode, channels: Sequence[int] | None) -> LeanForward | None:
    del mode, channels
    assert isinstance(module, BatchNorm)
    return _Norm(module) if is_frozen_norm(module) else None


def _activation(
    module: nn.Module, mode: Mode, channels: Sequence[int] | None
) -> LeanForward | None:
    del mode, channels
    assert isinstance(module, nn.ReLU | nn.ReLU6 | nn.Hardswish)
    return _Activation(module)


def _max_pool(module: nn.Module, mode: Mode, channels: Sequence[int] | None) -> LeanForward | None:
    del mode, channels
    assert isinstance(module, nn.MaxPool2d)
    kernel, stride, padding, dilation = (
        value if isinstance(value, tuple) else (value, value)
        for value in (module.kernel_size, module.stride, module.padding, module.dilation)
    )
    if module.ceil_mode or module.return_indices or dilation != (1, 1):
        return None
    if kernel[0] * kernel[1] > MOST_TAPS:
        return None
    return _MaxPool(module, (kernel, stride, padding))


def _listed(mode: Mode, channels: Sequence[int] | None) -> Sequence[int]:
    if channels is None:
        raise PlanError(f"mode {mode} needs the channels that it trains, and none are given")
    return channels


_Maker: TypeAlias = Callable[[nn.Module, Mode, "Sequence[int] | None"], "LeanForward | None"]
_MAKERS: tuple[tuple[type[nn.Module], _Maker], ...] = (
    (nn.Conv2d, _conv),
    (nn.Linear, _linear),
    (BatchNorm, _norm),
    (nn.LSTM, _lstm),
    (nn.ReLU6, _activation),
    (nn.ReLU, _activation),
    (nn.Hardswish, _activation),
    (nn.MaxPool2d, _max_pool),
)
