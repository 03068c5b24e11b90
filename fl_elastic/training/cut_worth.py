"""The gain of training down to each possible cut of a model in a fixed time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from fl_elastic.errors import BudgetError, DivergedError
from fl_elastic.groups import Batch, LossFn
from fl_elastic.groups.forward import all_finite, compute_loss
from fl_elastic.groups.untouched import same_start, untouched
from fl_elastic.optimizers import OptimizerFn, made_by, shadow_of
from fl_elastic.planning.request import STEP_GAIN_EXPONENT
from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.memory import code_to_load, mask_bytes
from fl_elastic.training.costs import lasting_costs
from fl_elastic.training.options import TrainerOptions

# Chosen on the two tasks of the benchmark across rounds: with the whole exponent the cut lay too high on the
# traffic signs.
_SHARE_OF_EXPONENT = 0.5


def cut_worth(
    model: nn.Module,
    loss_fn: LossFn,
    batches: Sequence[Batch],
    profile: CostProfile,
    options: TrainerOptions,
    examples: int,
    *,
    optimizer_fn: OptimizerFn,
    memory: float | None = None,
) -> dict[str, float]:
    r"""Return the gain of a round of fixed length that trains down to each possible cut.

    The gain is :math:`-\langle \Delta w(A), g(B)\rangle` over the groups above the cut: :math:`\Delta w(A)` is the
    optimiser's first step on one batch, :math:`g(B)` the gradient on another one. It is an unbiased estimate of how
    much that step decreases the loss. The optimiser's step is used because the product of two gradients overrates
    first layers with large gradients under an optimiser whose steps have similar lengths in all layers.

    The gain grows with the number of steps to the power of half of `STEP_GAIN_EXPONENT`, because a cut lasts for a
    whole run and not for one fit. The same time holds more steps, as each is shorter once the features at the cut
    are kept. Norms keep their statistics, as they do with a cut. The model is left as it was.

    Parameters
    ----------
    model, loss_fn
        Model and loss of the training.
    batches : sequence of batch
        Two batches, independent of each other.
    profile : CostProfile
        Costs of the whole model.
    options : TrainerOptions
        Settings for the prefix and the head that is not trained; the cut in them is ignored.
    examples : int
        The client's number of examples, whose features would be kept.
    optimizer_fn : callable
        ``optimizer_fn(parameters)`` returns the optimiser that will train.
    memory : float, optional
        Bytes that a step may take.

    Returns
    -------
    dict of str to float
        Gain by the name of the deepest group above each cut, nearest to the loss first; the last entry is the whole
        model. A negative gain counts as zero. Empty if the kept head is all that the batches use.

    Raises
    ------
    BudgetError
        If a step that trains everything needs more memory.
    DivergedError
        If a loss or a gradient is not finite.
    """
    taken = replace(profile, code_bytes=code_to_load())
    needed = mask_bytes(taken, np.ones(len(profile), bool))
    if memory is not None and needed > memory:
        raise BudgetError(
            f"a step that trains everything takes {needed:.0f} bytes, the memory budget is {memory:.0f}"
        )
    graph = profile.graph
    weights = {
        name: model.get_parameter(name) for group in graph.groups for name in group.parameters
    }
    with untouched(model, loss_fn), same_start(model):
        model.eval()
        one, other = (
            _gradients(model, loss_fn, batch, weights) for batch in (batches[0], batches[-1])
        )
        steps = _first_step(made_by(optimizer_fn, model), model, one)
    gains = {name: -float(torch.sum(steps[name] * other[name])) for name in weights}
    trained = np.array([group.name != options.part.kept_head for group in graph.groups])
    trained[list(graph.unused)] = False
    scores = np.array([sum(gains[name] for name in group.parameters) for group in graph.groups])
    gained = np.cumsum(np.where(trained, scores, 0.0)).clip(min=0.0)
    found: dict[str, float] = {}
    for above in sorted({*(cut.groups_above for cut in graph.cuts), len(graph.groups)}):
        if above and trained[:above].any():
            name = graph.groups[above - 1].name
            costs = lasting_costs(
                profile, replace(options, part=replace(options.part, cut=name)), examples
            )
            more = profile.full_step_seconds / costs.full_step_seconds
            found[name] = float(gained[above - 1]) * more ** (
                _SHARE_OF_EXPONENT * STEP_GAIN_EXPONENT
            )
    return found


def _gradients(
    model: nn.Module, loss_fn: LossFn, batch: Batch, weights: dict[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Return the gradient of the loss on a batch; raise DivergedError if it is not finite."""
    for weight in weights.values():
        weight.requires_grad_(True)
    loss = compute_loss(model, loss_fn, batch)
    found = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)
    if not all_finite(loss) or not all(all_finite(gradient) for gradient in found):
        raise DivergedError(
            f"the loss on a batch is {loss.item()} or its gradient is not finite: check the batch for NaN"
        )
    return dict(zip(weights, found, strict=True))


def _first_step(
    optimizer: torch.optim.Optimizer, model: nn.Module, gradients: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the change of each weight by the optimiser's first step with these gradients, without applying it."""
    before = {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    after = {name: nn.Parameter(tensor.clone()) for name, tensor in before.items()}
    for name, gradient in gradients.items():
        after[name].grad = gradient
    shadow_of(optimizer, ((model.get_parameter(n), tensor) for n, tensor in after.items())).step()
    return {name: after[name].detach() - before[name] for name in gradients}
