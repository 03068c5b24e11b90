"""The policy of the published setting: filtered gradients in the last convolutions."""

from __future__ import annotations

from fl_elastic.errors import PlanError
from fl_elastic.groups import Mode
from fl_elastic.groups.graph import BackwardGraph, GroupKind
from fl_elastic.planning.channel_modes import has_operations
from fl_elastic.planning.plan import Plan
from fl_elastic.planning.policy import POLICIES, Needs, Policy
from fl_elastic.planning.request import PlanRequest
from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.layer_shapes import entering_shape


@POLICIES.register("gradient_filter")
class GradientFilterPolicy(Policy):
    """Train the head exactly and the last four convolutions with both gradients filtered over 2 x 2 patches.

    This is the setting of Yang, Li and Marculescu (CVPR 2023) for classification. As there, a convolution with
    kernel 1 and a stride (a shortcut) is never filtered and stays frozen. Norms stay frozen, which is an
    assumption: the paper keeps them in eval mode and does not say which of them train. Convolutions without a
    filtered operation are not filtered either: one- or three-dimensional, transposed, used twice, with a computed
    weight, or padded with anything but zeros. As long as the plan does not fit, layers are left out, deepest first.

    Parameters
    ----------
    layers : int
        Number of filtered convolutions; by default the paper's 4.
    patch : int
        Side of a patch, at least 2.

    Raises
    ------
    PlanError
        If nothing would be filtered.
    """

    def __init__(self, layers: int = 4, patch: int = 2) -> None:
        if layers < 1:
            raise PlanError(
                f"policy 'gradient_filter' with {layers} layers filters nothing: give 1 or more"
            )
        if patch < 2:
            raise PlanError(f"a patch of side {patch} filters nothing: give 2 or more")
        self.layers = layers
        self.mode = Mode.filtered(patch, inputs=True)
        self.needs = Needs(modes=(self.mode,))

    def refuse_misfit(self, profile: CostProfile) -> None:
        """Raise PlanError for a model without a convolution that can be filtered."""
        if not _filterable(profile):
            graph = profile.graph
            raise PlanError(
                "policy 'gradient_filter' filters the last two-dimensional convolutions with a weight of their own "
                "that are used once a step, and this model has none besides its "
                f"head {graph.groups[graph.head].name!r}: use policy 'elastic'"
            )

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan with as many of the last convolutions, up to ``layers``, as fit."""
        graph = request.profile.graph
        candidates = _filterable(request.profile)[: self.layers]
        while True:
            modes = [Mode.FROZEN] * len(graph.groups)
            modes[graph.head] = Mode.FULL
            for index in candidates:
                modes[index] = self.mode
            if not candidates or request.fits_modes(modes):
                return request.plan("gradient_filter", modes)
            candidates.pop()


def _filterable(profile: CostProfile) -> list[int]:
    """Return the convolutions that the paper would filter and that can be filtered, in backward order."""
    graph = profile.graph
    return [
        index
        for index, group in enumerate(graph.groups)
        if group.kind is GroupKind.CONV and index != graph.head
        if has_operations(profile, index) and not _is_shortcut(graph, index)
    ]


def _is_shortcut(graph: BackwardGraph, index: int) -> bool:
    """Return whether this is a 1 x 1 convolution that makes its map smaller."""
    node = graph.nodes[graph.group_nodes()[index][-1]]
    shapes = graph.groups[index].shapes
    pointwise = any(len(shape) == 4 and shape[2:] == (1, 1) for shape in shapes)
    given = entering_shape(graph, node)
    return pointwise and len(given) == 4 and len(node.shape) == 4 and given[2] > node.shape[2]
