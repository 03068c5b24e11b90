"""Costs of groups in other modes than full, measured layer by layer, for devices whose time is simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_elastic.groups import Mode
from fl_elastic.groups.graph import BackwardGraph
from fl_elastic.groups.trainable import flags_kept
from fl_elastic.groups.untouched import preserved_rng
from fl_elastic.ops.lean_forward import lean_forward
from fl_elastic.ops.lean_kind import convolution_module
from fl_elastic.profiling.clock import Clock
from fl_elastic.profiling.profile import CostProfile, ModeCosts

_REPEATS = 6


def measure_modes(
    profile: CostProfile,
    model: nn.Module,
    timer: Clock,
    modes: Sequence[Mode],
) -> CostProfile:
    """Return the profile with the measured costs of ``modes`` for every two-dimensional convolution.

    Each layer runs alone on random data of its shape, exactly and in each mode in turn; layers of equal shape are
    measured once. Norms and biases have no mode between bias and full, and other layers only have full.
    """
    graph = profile.graph
    shape = (len(graph.groups), len(modes))
    update, path = np.full(shape, np.nan), np.full(shape, np.nan)
    known: dict[object, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
    for group in range(len(graph.groups)):
        module = convolution_module(graph, model, group)
        inputs = _input_shape(graph, group)
        if module is None or len(inputs) != 4:
            continue
        key = (
            inputs, tuple(module.weight.shape), module.stride, module.padding, module.dilation,
            module.groups, module.bias is None,
        )  # fmt: skip
        if key not in known:
            known[key] = _ratios(module, inputs, modes, timer)
        update[group], path[group] = known[key]
    return replace(profile, modes=ModeCosts(tuple(modes), update, path))


def with_modes(
    profile: CostProfile, model: nn.Module, timer: Clock, modes: Sequence[Mode]
) -> CostProfile:
    """Return the profile with costs of ``modes``; those already measured are kept."""
    known = () if profile.modes is None else profile.modes.modes
    if set(modes) <= set(known):
        return profile
    # Whether costs were stored must not affect later random numbers.
    with preserved_rng():
        return measure_modes(profile, model, timer, tuple(dict.fromkeys([*known, *modes])))


def _input_shape(graph: BackwardGraph, group: int) -> tuple[int, ...]:
    """Return the input shape of a group's layer; empty if it is not known."""
    node = graph.nodes[graph.group_nodes()[group][-1]]
    return graph.nodes[node.inputs[0]].shape if node.inputs else ()


def _ratios(
    module: nn.Conv2d, inputs: tuple[int, ...], modes: Sequence[Mode], timer: Clock
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    parameters: list[nn.Parameter] = list(module.parameters())
    x = torch.randn(inputs).to(module.weight).contiguous(memory_format=torch.channels_last)
    with flags_kept(parameters):
        module.requires_grad_(True)
        forwards = [None, *(_applicable(module, mode, inputs) for mode in modes)]
        # Rows: exact, then each mode. Columns: own gradient with the forward pass, and both gradients.
        fastest = np.full((len(forwards), 2), np.inf)
        for repeat in range(_REPEATS + 1):
            for row, (mode, forward) in enumerate(zip([Mode.FULL, *modes], forwards, strict=True)):
                if forward is None and row:
                    continue
                call = forward or module.forward
                seen = [
                    _time(call, x, parameters, mode, timer, path=path) for path in (False, True)
                ]
                if repeat:
                    fastest[row] = np.minimum(fastest[row], seen)
    forward_alone = _forward_seconds(module, x, timer)
    own = np.maximum(fastest[:, 0] - forward_alone, 1e-9)
    measured = np.isfinite(fastest[1:, 0])
    # Only a filtered error gradient costs differently to pass on; other differences would be noise.
    filters = np.array([mode.filters_input for mode in modes]) & measured
    path = np.maximum(np.diff(np.where(np.isfinite(fastest), fastest, 0.0))[:, 0], 1e-9)
    return (
        np.where(measured, own[1:] / own[0], np.nan),
        np.where(measured, np.where(filters, path[1:] / path[0], 1.0), np.nan),
    )


def _applicable(module: nn.Conv2d, mode: Mode, inputs: tuple[int, ...]) -> object:
    """Return the forward function of a mode; None if it does not apply or equals another mode."""
    channels = None
    if mode.kind == "bias" and module.bias is None:
        return None
    if mode.kind == "channels":
        whole = module.in_channels if mode.axis == "in" else module.out_channels
        count = mode.channel_count(whole)
        # Among grouped layers only depthwise ones have channels that can be chosen one by one.
        if count == whole or module.groups not in (1, module.in_channels):
            return None
        channels = list(range(count))
    if mode.kind == "filtered" and min(inputs[2:]) <= 1:
        return None
    return lean_forward(module, mode, channels)


def _time(
    call: object, x: Tensor, parameters: list[nn.Parameter], mode: Mode, timer: Clock, *, path: bool
) -> float:
    wanted = parameters[1:] if mode.kind == "bias" else parameters
    with flags_kept(parameters):
        for parameter in parameters:
            parameter.requires_grad_(any(parameter is other for other in wanted))
        leaf = x.detach().requires_grad_(path)
        started = timer()
        output = call(leaf)  # type: ignore[operator]
        torch.autograd.grad(output, [*wanted, leaf] if path else wanted, output.detach())
        return timer() - started


def _forward_seconds(module: nn.Conv2d, x: Tensor, timer: Clock) -> float:
    fastest = np.inf
    for _ in range(_REPEATS):
        started = timer()
        module(x)
        fastest = min(fastest, timer() - started)
    return float(fastest)
