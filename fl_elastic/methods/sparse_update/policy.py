"""Train the biases of the last layers and input channels of a few of them: published schemes, or a rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from fl_elastic.errors import BudgetError
from fl_elastic.groups import Mode
from fl_elastic.groups.graph import BackwardGraph, GroupKind
from fl_elastic.methods.sparse_update.published_schemes import (
    PUBLISHED_MODELS,
    PublishedModel,
    Scheme,
)
from fl_elastic.planning.channel_modes import (
    RATIOS,
    channel_modes,
    known_layers,
    refuse_without_layers,
    trainable_layers,
)
from fl_elastic.planning.group_options import group_options
from fl_elastic.planning.importance.fidelity import Fidelity
from fl_elastic.planning.multiple_choice.choices import ChoiceLimits
from fl_elastic.planning.multiple_choice.knapsack import multiple_choice_knapsack
from fl_elastic.planning.plan import Plan
from fl_elastic.planning.policy import POLICIES, Needs, Policy
from fl_elastic.planning.request import PlanRequest
from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.layer_shapes import LayerShape
from fl_elastic.profiling.profile import ModeCosts

_MODES = tuple(Mode.channels(ratio, "in") for ratio in RATIOS[1:])
_BUDGET_SHARES = (1.0, 0.9, 0.8, 0.65, 0.5, 0.35, 0.2, 0.1)


@POLICIES.register("sparse_update")
class SparseUpdatePolicy(Policy):
    """Train the head, the biases of the last layers, and some input channels of a few layers among them.

    SparseUpdate of "On-Device Training Under 256KB Memory" (Lin et al., NeurIPS 2022). For a model with the
    convolutions of one of the three published models, the largest published scheme that fits is used. For any other
    model the choice is SparseUpdate-style. The published schemes train almost only the first pointwise convolution
    of each block in the later half. So the candidates are the pointwise layers of the later half with more outputs
    than inputs; if there are none, all pointwise layers there, or else all dense ones. Shortcuts are never
    candidates. The multiple-choice solver chooses their shares of channels, and biases are trained as deep as the
    error gradient goes, half as deep, or not at all. The worth is assumed to be equal for all layers, times the
    square root of the trained share of channels.

    The published models have no norms, because these are folded into the convolutions; here a norm is trained
    instead of the bias before it. If nothing fits, only the head is trained.

    Parameters
    ----------
    scheme : Scheme, optional
        Which parts of the layers, counted from the input, to train; by default chosen as described above.
    """

    needs = Needs(modes=_MODES, channel_score="l2")
    name: ClassVar[str] = "sparse_update"

    def __init__(self, scheme: Scheme | None = None) -> None:
        self.scheme = scheme

    def refuse_misfit(self, profile: CostProfile) -> None:
        """Raise PlanError for a model without a convolution or linear layer besides its head."""
        refuse_without_layers(self.name, profile.graph)

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan of the largest scheme that fits; raise BudgetError if not even the head does."""
        profile = request.profile
        model = published_model(profile.graph)
        if self.scheme is not None:
            choices: Iterator[list[Mode]] = iter([scheme_modes(profile, self.scheme)])
        elif model is not None:
            choices = (scheme_modes(profile, scheme) for scheme in reversed(model.schemes))
        else:
            choices = _transferred(request)
        head_alone = scheme_modes(profile, Scheme(0))
        fitting = (modes for modes in choices if request.fits_modes(modes))
        return request.plan(self.name, next(fitting, head_alone))


def published_model(graph: BackwardGraph) -> PublishedModel | None:
    """Return the published model with these convolutions; None if there is none. Map sizes may differ."""
    weights = [
        shape
        for index, group in reversed(list(enumerate(graph.groups)))
        for shape in group.shapes
        if group.kind is GroupKind.CONV and index != graph.head and len(shape) == 4
    ]
    for model in PUBLISHED_MODELS:
        expected = [
            (la.out_channels, la.in_channels // la.groups, *la.kernel) for la in model.layers
        ]
        if weights == expected:
            return model
    return None


def scheme_modes(profile: CostProfile, scheme: Scheme) -> list[Mode]:
    """Return how each group is trained by ``scheme``, in backward order; the head is always trained whole.

    Layers are the convolutions and linear layers except the head, counted from the input. A layer that cannot be
    trained by channels is trained whole.
    """
    graph = profile.graph
    layers = trainable_layers(profile)[::-1]
    offered = channel_modes(profile, "in")
    norms = _norms_after(graph)
    modes = [Mode.FROZEN] * len(graph.groups)
    modes[graph.head] = Mode.FULL
    for group, update in zip(layers, scheme.updates(len(layers)), strict=True):
        if update.fraction:
            wanted = Mode.channels(update.fraction, "in")
            modes[group] = wanted if wanted in offered[group] else Mode.FULL
        elif update.bias and graph.groups[group].vectors():
            modes[group] = Mode.BIAS
        if update.bias and group in norms:
            modes[norms[group]] = Mode.FULL
    return modes


def _norms_after(graph: BackwardGraph) -> dict[int, int]:
    """Return the norm that reads each group's output, by group index."""
    found = {}
    for node in graph.nodes:
        if node.group is None or not node.inputs:
            continue
        below = graph.nodes[node.inputs[0]].group
        if below is not None and graph.groups[node.group].kind is GroupKind.NORM:
            found[below] = node.group
    return found


def _transferred(request: PlanRequest) -> Iterator[list[Mode]]:
    """Yield choices for a model without a published scheme, largest first."""
    profile = request.profile
    layers = trainable_layers(profile)[::-1]
    place = {group: index for index, group in enumerate(layers)}
    assumed = _assumed_request(request, _later_candidates(profile))
    options = group_options(assumed, _MODES)
    budget = request.budget
    spend = request.allowed_step_seconds - profile.forward_seconds[0] - profile.fixed_seconds
    for share in _BUDGET_SHARES:
        limits = ChoiceLimits(
            spend * share,
            np.inf if budget.memory is None else budget.memory * share,
            np.inf if budget.uplink is None else budget.uplink * share,
        )
        try:
            modes = options.modes_of(multiple_choice_knapsack(options.choices, limits).options)
        except BudgetError:
            return
        weights = tuple(
            (place[group], mode.fraction)
            for group, mode in enumerate(modes)
            if group in place and mode.kind in ("full", "channels")
        )
        reached = len(layers) - min((index for index, _ in weights), default=len(layers))
        for bias_layers in (reached, reached // 2, 0):
            yield scheme_modes(profile, Scheme(bias_layers, weights))


def _later_candidates(profile: CostProfile) -> list[int]:
    """Return the layers of the later half that a scheme would train."""
    layers = trainable_layers(profile)[::-1]
    known = known_layers(profile)
    later = layers[len(layers) // 2 :]
    dense = [g for g in later if g not in known or _is_dense(known[g])]
    pointwise = [g for g in dense if g in known and known[g].is_pointwise]
    widening = [g for g in pointwise if known[g].out_channels > known[g].in_channels]
    return widening or pointwise or dense


def _is_dense(layer: LayerShape) -> bool:
    """Return whether a layer reads every channel and is not just a downsampling shortcut."""
    return layer.groups == 1 and not (layer.is_pointwise and layer.in_size != layer.out_size)


def _assumed_request(request: PlanRequest, candidates: Sequence[int]) -> PlanRequest:
    """Return the request with the worth that the rule for other models assumes."""
    profile = request.profile
    shape = (len(profile), len(_MODES))
    worth, kept = np.zeros(len(profile)), np.full(shape, np.nan)
    offered = channel_modes(profile, "in")
    for group in candidates:
        worth[group] = 1.0
        for column, mode in enumerate(_MODES):
            if mode in offered[group]:
                # The solver squares this value, which leaves the square root of the share.
                kept[group, column] = mode.fraction**0.25
    costs = profile.modes
    if costs is None or any(costs.column(mode) is None for mode in _MODES):
        # Costs that were not measured are charged as the whole layer, as in the profile.
        costs = ModeCosts(_MODES, np.ones(shape), np.ones(shape))
    return replace(
        request,
        profile=replace(profile, modes=costs),
        importance=worth,
        fidelity=Fidelity(_MODES, kept),
    )
