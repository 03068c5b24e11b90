"""Temporary bytes of operations beyond what their shapes imply, from the allocations of recorded steps."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from fl_elastic.groups import Batch, LossFn
from fl_elastic.groups.forward import compute_loss
from fl_elastic.groups.torch_private import number_of, recorded_allocations
from fl_elastic.groups.untouched import preserved_rng
from fl_elastic.optimizers import alike
from fl_elastic.profiling.memory import taken_at_nodes
from fl_elastic.profiling.node_timer import TracedEdges
from fl_elastic.profiling.profile import CostProfile, Seconds, model_device

_FLOAT, _NUMBERS = 4.0, 4096
# Prefix of the name under which autograd's engine reports the start of a node.
_ENGINE = "autograd::engine::evaluate_function"


def with_bytes_beside(
    profile: CostProfile,
    edges: TracedEdges,
    model: nn.Module,
    loss_fn: LossFn,
    batches: Sequence[Batch],
    scale: float,
) -> CostProfile:
    """Return the profile with each node's temporary bytes beyond those that its shapes imply.

    An operation may use larger temporary tensors than it reads, keeps and returns, as a bilinear layer does. In the
    recorded steps each gradient is freed once it is computed. Convolutions are left out, because their copies
    depend on the number of examples; see `fl_elastic.profiling.reordered_copies`.

    Parameters
    ----------
    profile : CostProfile
        Costs of a step on the whole batch.
    edges : TracedEdges
        The edges of its graph.
    model, loss_fn
        The model and loss of the training.
    batches : sequence of tuple
        The whole batch, or a part of it and a part twice as large, from which the bytes of the whole batch are
        extrapolated; empty if not even a part fits.
    scale : float
        How many times larger the whole batch is than the first entry of ``batches``.
    """
    assert profile.saved is not None
    # Allocations on an accelerator are not recorded, and a backward pass inside the forward pass has other nodes.
    if model_device(model).type != "cpu" or profile.graph.is_of_second_order:
        batches = ()
    recorded = [_most_at_nodes(edges, model, loss_fn, batch) for batch in batches]
    most = recorded[0] if recorded else np.zeros((2, len(profile.graph.nodes)))
    if len(recorded) > 1:
        most = np.maximum(most + (scale - 1) * (recorded[1] - most), recorded[1])
    more = (most - taken_at_nodes(profile)).clip(min=0.0)
    known = ["Convolution" in node.name for node in profile.graph.nodes]
    return replace(profile, saved=replace(profile.saved, beside=np.where(known, 0.0, more)))


def optimizer_moment(made: torch.optim.Optimizer, device: torch.device) -> float:
    """Return the temporary bytes of an optimiser's step per scalar weight, besides its state; 4 if not known."""
    weight = nn.Parameter(torch.zeros(_NUMBERS, device=device))
    try:
        with preserved_rng():
            optimizer = alike(made, weight)
            for _ in range(2):
                weight.grad = torch.full_like(weight, 1e-6)
                with recorded_allocations() as events:
                    optimizer.step()
    except Exception:
        # For example an optimiser for matrices only.
        return _FLOAT
    taken = np.cumsum([change for _, _, change in events])
    return float(taken.max(initial=0.0)) / _NUMBERS if events else _FLOAT


def _most_at_nodes(edges: TracedEdges, model: nn.Module, loss_fn: LossFn, batch: Batch) -> Seconds:
    """Return the most bytes while each node runs forward, and while it runs backward, shape (2, M)."""
    with recorded_allocations() as events, gradients_let_go(model):
        loss = compute_loss(model, loss_fn, batch)
        place_of = {number_of(node): place for place, _, node in edges.along(loss.grad_fn)}
        loss.backward()  # type: ignore[no-untyped-call]
        del loss
    numbers = sorted(place_of)
    most = np.zeros((2, len(edges.graph.nodes)))
    taken = place = backward = 0
    for name, number, change in events:
        if name.startswith(_ENGINE):
            backward = 1
        elif backward:
            # A node of a recomputed part has another number: count its bytes for the node before it.
            place = place_of.get(number, place)
        elif number >= 0:
            place = place_of[numbers[max(bisect_right(numbers, number) - 1, 0)]]
        taken += change
        most[backward, place] = max(most[backward, place], taken)
    return most


@contextmanager
def gradients_let_go(model: nn.Module) -> Iterator[None]:
    """Free each parameter's gradient as soon as it is computed: all of them take as much memory as the weights."""

    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    handles = [
        parameter.register_post_accumulate_grad_hook(drop)  # type: ignore[no-untyped-call]
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
