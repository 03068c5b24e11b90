"""All costs of a plan, defined in the same way for every policy."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from fl_elastic.errors import BudgetError
from fl_elastic.groups import Mode
from fl_elastic.groups.graph import BackwardGraph, Block
from fl_elastic.planning.plan import Plan
from fl_elastic.planning.recompute import least_memory
from fl_elastic.planning.request import PlanRequest
from fl_elastic.profiling.macs import backward_macs, node_macs
from fl_elastic.profiling.memory import step_memory

_FLOAT = 4


@dataclass(frozen=True)
class CostReport:
    """Costs of one step of a plan; bytes and multiply-adds are for the whole batch in fp32.

    Attributes
    ----------
    policy : str
        The policy that made the plan.
    groups, depth : int
        Number of groups that are trained in any mode, and the index of the deepest one.
    recomputed : int
        Number of blocks that run a second time instead of being stored.
    predicted_step_seconds, predicted_speedup : float
        Time of one step, and of a full step over it.
    step_fraction : float
        Share of the requested steps that fits the time budget.
    activation_bytes : float
        Bytes kept between forward and backward pass by the operations that the plan runs (A).
    least_activation_bytes : float
        Bytes that the plan's modes need with the most economical operations and the same recomputed blocks (A_min).
    backward_bytes : float
        Activations, gradients and optimiser state, as if all existed at the same time (M_b).
    peak_bytes : float
        The bytes that a memory budget limits (`StepMemory.total`), plus all weights and the forward working set
        (M_p); the feature cache is not included.
    backward_macs : float
        Multiply-adds of the backward pass, including recomputed blocks; one multiply-add counts as 1.
    uplink_bytes : float
        Bytes of the partial update as fp32.
    """

    policy: str
    groups: int
    depth: int
    recomputed: int
    predicted_step_seconds: float
    predicted_speedup: float
    step_fraction: float
    activation_bytes: float
    least_activation_bytes: float
    backward_bytes: float
    peak_bytes: float
    backward_macs: float
    uplink_bytes: float


def cost_report(request: PlanRequest, plan: Plan) -> CostReport:
    """Return the costs of a step of ``plan`` by the request's cost profile.

    Raises
    ------
    PlanError
        If the plan recomputes a module that is not a block of the profile.
    """
    profile, modes = request.profile, plan.modes
    case, kept = plan.case(profile), plan.memory(profile)
    blocks = case.recomputed
    least = step_memory(case.profile, modes, lean=True, recomputed=blocks)
    weights = float(profile.parameter_bytes.sum())
    working = forward_working_bytes(profile.graph, profile.key.batch_shape)
    return CostReport(
        policy=plan.policy,
        groups=int(plan.mask.sum()),
        depth=plan.depth,
        recomputed=len(blocks),
        predicted_step_seconds=plan.predicted_step_seconds,
        predicted_speedup=plan.predicted_speedup,
        step_fraction=plan.step_fraction,
        activation_bytes=kept.activations,
        least_activation_bytes=min(least.activations, kept.activations),
        backward_bytes=kept.kept,
        peak_bytes=kept.total + weights + working,
        backward_macs=backward_macs(profile.graph, modes) + _again(profile.graph, blocks),
        uplink_bytes=request.uplink_bytes(modes),
    )


def forward_working_bytes(graph: BackwardGraph, input_shape: Iterable[int] = ()) -> float:
    """Return the largest sum of input and output of one operation in fp32: the peak of a pass that stores nothing.

    Parameters
    ----------
    graph : BackwardGraph
        Operations of unknown shape count as zero.
    input_shape : iterable of int
        Shape of the model's input, batch first, which operations without an earlier operation read.
    """
    sizes = [_FLOAT * math.prod(node.shape) if node.shape else 0 for node in graph.nodes]
    entering = tuple(input_shape)
    batch = _FLOAT * math.prod(entering) if entering else 0
    largest = 0
    for node, size in zip(graph.nodes, sizes, strict=True):
        if node.shape:
            given = sum(sizes[index] for index in node.inputs) if node.inputs else batch
            largest = max(largest, size + given)
    return float(largest)


def check_feasible(request: PlanRequest) -> None:
    """Raise BudgetError if memory or uplink do not even admit the head; the message says how much is needed."""
    memory, uplink = request.budget.memory, request.budget.uplink
    head = [Mode.FULL if on else Mode.FROZEN for on in request.head_mask()]
    least = math.ceil(least_memory(request.profile, head, lean=True))
    if memory is not None and least > memory:
        raise BudgetError(
            f"no policy can meet a memory budget of {memory:.0f} bytes: training the head alone takes {least}; "
            "raise the budget to that, or lower the batch size"
        )
    sent = math.ceil(request.uplink_bytes(head))
    if uplink is not None and sent > uplink:
        raise BudgetError(
            f"no policy can meet an uplink budget of {uplink:.0f} bytes: the head alone takes {sent}; "
            "raise the budget to that"
        )


def _again(graph: BackwardGraph, blocks: Iterable[Block]) -> float:
    macs = node_macs(graph)
    return float(sum(macs[list(block.nodes)].sum() for block in blocks))
