"""Windows of channels: neighbouring units of each inner width that a step trains, and their costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import PlanError
from fl_elastic.groups import TensorGroup
from fl_elastic.groups.graph import BackwardGraph, Width
from fl_elastic.planning.step_transform import StepCase, StepOpener, StepTransform
from fl_elastic.profiling.profile import CostProfile, Seconds

if TYPE_CHECKING:
    from torch import nn

    from fl_elastic.planning.plan import Plan


Every = Literal["step", "fit"]


@dataclass(frozen=True)
class Windows(StepTransform):
    """The windows of some widths that steps run on.

    Attributes
    ----------
    widths : tuple of Width
        The widths; all other channels are used completely.
    rate : float
        Share of the units that a window keeps, in (0, 1].
    every : {"step", "fit"}
        Whether the starts of windows are drawn for each step or once for a fit.
    seed : int
        Seed of the random starts.

    Raises
    ------
    PlanError
        If one of them is invalid.
    """

    widths: tuple[Width, ...]
    rate: float
    every: Every = "step"
    seed: int = 0
    runs_part: ClassVar[bool] = True
    opens_steps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise PlanError(f"keep-rate {self.rate} must be above 0 and at most 1")
        if self.every not in ("step", "fit"):
            raise PlanError(f"windows are drawn every 'step' or every 'fit', not {self.every!r}")

    @property
    def lasts_a_fit(self) -> bool:
        """Whether a fit keeps its first plan, because it trains and sends only that plan's windows."""
        return self.every == "fit"

    def check(self, model: nn.Module, plan: Plan) -> None:
        """Raise PlanError: only `ElasticTrainer` can open windows for each step."""
        del model
        raise PlanError(
            f"policy {plan.policy!r} trains a window of channels, and only ElasticTrainer can set it for "
            "each step: train with ElasticTrainer, or choose another policy"
        )

    def opener(self, model: nn.Module, before: StepOpener | None) -> StepOpener:
        """Return the opener of a window for each step."""
        # Imported here: only a fit runs windows.
        from fl_elastic.methods.windows.steps import WindowSteps

        return WindowSteps(model, self, before if isinstance(before, WindowSteps) else None)

    def closing_passes(self, model: nn.Module, steps: int) -> int:
        """Return the number of passes for recomputing running statistics."""
        from fl_elastic.methods.windows.steps import statistics_passes

        return statistics_passes(model, steps)

    def case(self, case: StepCase) -> StepCase:
        """Return the costs of the same step with every inner width cut down to the length of its window."""
        kept = {width: self.length(width) for width in self.widths}
        return replace(case, profile=narrow_profile(case.profile, kept))

    def length(self, width: Width) -> int:
        """Return how many units of a width are kept; at least one.

        Examples
        --------
        >>> width = Width("a", 10, 1, ("a",), (), (), (), ())
        >>> [Windows((width,), rate).length(width) for rate in (1.0, 0.5, 0.25, 0.01)]
        [10, 5, 2, 1]
        """
        return max(1, round(width.size * self.rate))

    def starts(self, step: int = 0) -> dict[str, int]:
        """Return the start of each width's window in a step of the fit."""
        generator = np.random.default_rng([self.seed, 0 if self.every == "fit" else step])
        return {
            width.name: int(generator.choice(window_starts(width.size, self.length(width))))
            for width in self.widths
        }


def window_starts(size: int, length: int) -> NDArray[np.int64]:
    """Return the possible starts of a window: the fewest such that every unit lies in equally many windows.

    All starts are equally likely. After the last unit, a window continues with the first one; no window reaches
    that far if its length divides the size.

    Parameters
    ----------
    size, length : int
        Number of units, and number of units in a window.

    Examples
    --------
    >>> window_starts(6, 4).tolist(), window_starts(6, 3).tolist()
    ([0, 2, 4], [0, 3])
    """
    if length >= size:
        return np.zeros(1, dtype=np.int64)
    return np.arange(0, size, math.gcd(size, length))


def narrow_profile(profile: CostProfile, kept: Mapping[Width, int]) -> CostProfile:
    """Return the cost profile of the model with fewer units in some of its widths.

    A node's cost is multiplied by the share of its operations that is left; for a layer between two such widths
    this is the product of both shares. Forward time is assumed to be distributed over the nodes like backward time.
    Groups have the shapes of their windows.

    Parameters
    ----------
    profile : CostProfile
        Profile of the whole model.
    kept : mapping of Width to int
        Number of units that each width keeps.
    """
    graph = profile.graph
    nodes: Seconds = np.ones(len(graph.nodes))
    outputs: Seconds = np.ones(len(graph.nodes))
    for width, length in kept.items():
        nodes[list(width.touching)] *= length / width.size
        outputs[list(width.holding)] *= length / width.size
    backward = profile.node_update_seconds + profile.node_path_seconds
    running = float(backward.sum())
    forward = float((backward * nodes).sum()) / running if running else 1.0
    shapes = narrow_shapes(graph, kept)
    groups = tuple(
        replace(group, shapes=tuple(shapes[name] for name in group.parameters))
        for group in graph.groups
    )
    smaller = np.array(
        [
            _numbers(new) / max(_numbers(old), 1)
            for new, old in zip(groups, graph.groups, strict=True)
        ]
    )
    return replace(
        profile,
        graph=replace(graph, groups=groups, widths=()),
        node_update_seconds=profile.node_update_seconds * nodes,
        node_path_seconds=profile.node_path_seconds * nodes,
        optimizer_seconds=profile.optimizer_seconds * smaller,
        forward_seconds=profile.forward_seconds * forward,
        node_saved_bytes=profile.node_saved_bytes * nodes,
        saved=None if profile.saved is None else profile.saved.scaled(nodes, outputs),
    )


def narrow_shapes(graph: BackwardGraph, kept: Mapping[Width, int]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter of the graph's groups if the widths keep this many units."""
    shapes = {
        name: list(shape)
        for group in graph.groups
        for name, shape in zip(group.parameters, group.shapes, strict=True)
    }
    for width, length in kept.items():
        axes = [(module, 0, 1) for module in (*width.makers, *width.keepers)]
        axes += [(reader.module, 1, reader.repeat) for reader in width.readers]
        for module, axis, repeat in axes:
            for tensor in ("weight", "bias") if axis == 0 else ("weight",):
                shape = shapes.get(f"{module}.{tensor}" if module else tensor)
                if shape is not None:
                    shape[axis] = length * width.unit * repeat
    return {name: tuple(shape) for name, shape in shapes.items()}


def _numbers(group: TensorGroup) -> int:
    return sum(math.prod(shape) for shape in group.shapes)
