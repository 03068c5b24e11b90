"""Sequential modules whose filtered convolutions run as chains with one backward pass on patches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from fl_elastic.groups.mode import Mode
from fl_elastic.groups.torch_private import called_hooks
from fl_elastic.methods.gradient_filter.patch_chain import PatchChain, PatchUnit
from fl_elastic.methods.gradient_filter.patch_grid import run_patch_chain
from fl_elastic.ops.geometry import ConvGeometry
from fl_elastic.ops.lean_forward import LeanForward, has_foreign_forward
from fl_elastic.ops.norm import is_frozen_norm


def joined_forward(module: nn.Module, modes: Mapping[nn.Module, Mode]) -> LeanForward | None:
    """Return a forward function of a Sequential that joins its filtered convolutions into chains.

    Parameters
    ----------
    module : nn.Module
        The Sequential; Sequentials inside it are joined as well.
    modes : mapping of nn.Module to Mode
        Modes of its layers. Layers that filter the input gradient too (WX), with the same patch side, are joined.

    Returns
    -------
    LeanForward or None
        None for another module, and if no two such convolutions follow one another with only a frozen BatchNorm and
        a ReLU or ReLU6 between them. A layer with hooks is not joined.
    """
    if type(module).forward is not nn.Sequential.forward:
        return None
    layers = _layers(module)
    steps: list[nn.Module | PatchChain] = []
    place = 0
    while place < len(layers):
        units, patch, end = _units(layers, place, modes)
        if len(units) > 1:
            steps.append(PatchChain(tuple(units), patch))
            place = end
        else:
            steps.append(layers[place])
            place += 1
    return _Joined(module, tuple(steps)) if len(steps) < len(layers) else None


@dataclass(frozen=True)
class _Joined(LeanForward):
    steps: tuple[nn.Module | PatchChain, ...]

    def fits(self, x: Tensor) -> bool:
        del x
        chains = (step for step in self.steps if isinstance(step, PatchChain))
        norms = (unit.norm for chain in chains for unit in chain.units)
        return all(norm is None or is_frozen_norm(norm) for norm in norms)

    def run(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = run_patch_chain(x, step) if isinstance(step, PatchChain) else step(x)
        return x


def _layers(sequential: nn.Module) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for child in sequential.children():
        if type(child).forward is nn.Sequential.forward and not _is_watched(child):
            layers += _layers(child)
        else:
            layers.append(child)
    return layers


def _units(
    layers: list[nn.Module], place: int, modes: Mapping[nn.Module, Mode]
) -> tuple[list[PatchUnit], int, int]:
    """Return the units that start at ``place``, the side of their patches, and the place after them."""
    units: list[PatchUnit] = []
    patch = 0
    while place < len(layers):
        conv = layers[place]
        mode = modes.get(conv, Mode.FULL)
        if (
            not isinstance(conv, nn.Conv2d)
            or not _joins(conv, mode)
            or patch not in (0, mode.patch)
        ):
            break
        patch = mode.patch
        place += 1
        norm = activation = None
        if place < len(layers) and (norm := _as_norm(layers[place])):
            place += 1
        if place < len(layers) and (activation := _as_rectifier(layers[place])):
            place += 1
        units.append(PatchUnit(conv, norm, activation))
    return units, patch, place


def _joins(conv: nn.Conv2d, mode: Mode) -> bool:
    if not mode.filters_input or _is_watched(conv):
        return False
    geometry = ConvGeometry.of(conv)
    plain = type(conv).forward is nn.Conv2d.forward
    return plain and geometry is not None and not geometry.skips_pixels


def _as_norm(layer: nn.Module) -> nn.BatchNorm2d | None:
    if not isinstance(layer, nn.BatchNorm2d) or _is_watched(layer):
        return None
    plain = type(layer).forward is nn.BatchNorm2d.forward
    return layer if plain and is_frozen_norm(layer) else None


def _as_rectifier(layer: nn.Module) -> nn.ReLU | nn.ReLU6 | None:
    plain = type(layer) in (nn.ReLU, nn.ReLU6) and not _is_watched(layer)
    return layer if plain and isinstance(layer, nn.ReLU | nn.ReLU6) else None


def _is_watched(module: nn.Module) -> bool:
    """Return whether hooks watch the calls of this module, or its forward was replaced by the user."""
    return called_hooks(module) or has_foreign_forward(module)
