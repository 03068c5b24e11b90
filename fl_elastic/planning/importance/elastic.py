"""The importance of ElasticTrainer, corrected to use two independent batches."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fl_elastic.errors import DivergedError
from fl_elastic.groups import Batch, LossFn
from fl_elastic.groups.forward import all_finite, compute_loss
from fl_elastic.groups.untouched import preserved_rng, untouched
from fl_elastic.planning.importance.base import IMPORTANCES, Importance, Probe, Scores


@IMPORTANCES.register("elastic")
class ElasticImportance(Importance):
    r"""First-order loss decrease of the step that the real optimiser would take.

    :math:`I_k = -\langle g_k(B;\,w+\Delta w),\ \Delta w_k(A)\rangle`, where :math:`\Delta w` is the optimiser's
    update from batch A, and g is the gradient on batch B after this update. ElasticTrainer (Huang et al., MobiSys
    2023, section 4) takes both from one batch, which adds that batch's noise to every score in proportion to the
    group's size; an independent batch B removes this bias.
    """

    batches_needed = 2
    read_from_steps = True

    def score(self, probe: Probe) -> Scores:
        """Return the score of each group, shape (N,); raise DivergedError if the loss is not finite."""
        names = [name for group in probe.groups for name in group.parameters]
        before = {name: probe.model.get_parameter(name).detach() for name in names}
        after = {name: nn.Parameter(value.clone()) for name, value in before.items()}
        first, second = probe.batches[0], probe.batches[-1]
        with untouched(probe.model, probe.loss_fn):
            gradients = probe_gradients(probe, first, after)
            # The optimiser's state is laid out over every trainable parameter, in the model's order.
            shadows = [
                after[name] if name in after else nn.Parameter(parameter.detach().clone())
                for name, parameter in probe.model.named_parameters()
                if parameter.requires_grad or name in after
            ]
            optimizer = probe.shadow_optimizer(shadows)
            for name, gradient in gradients.items():
                after[name].grad = gradient
            optimizer.step()
            gradients = probe_gradients(probe, second, after)
        decrease = {
            name: -float(torch.sum(gradients[name] * (after[name].detach() - before[name])))
            for name in names
        }
        return np.array([sum(decrease[name] for name in g.parameters) for g in probe.groups])


@IMPORTANCES.register("elastic_same_batch")
class SameBatchImportance(ElasticImportance):
    """The score as ElasticTrainer published it, for comparison: update and gradient are from one batch."""

    batches_needed = 1
    read_from_steps = False


def probe_gradients(
    probe: Probe, batch: Batch, weights: dict[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Return the gradient of the loss on ``batch`` at ``weights``, without touching the model.

    Buffers are copied for the call, and dropout repeats the same pattern in every call.

    Raises
    ------
    DivergedError
        If the loss or a gradient is not finite.
    """
    new: dict[int, Tensor] = {
        id(probe.model.get_parameter(name)): weight for name, weight in weights.items()
    }
    new |= {id(buffer): buffer.clone() for buffer in probe.model.buffers()}
    values = {f"model.{name}": new[id(old)] for name, old in _places(probe.model) if id(old) in new}
    with preserved_rng():
        # With tie_weights, torch would not restore the weights of a layer that is used twice.
        loss = functional_call(
            _Loss(probe.model, probe.loss_fn), values, (batch,), tie_weights=False
        )
    found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
    gradients = {
        name: torch.zeros_like(weight) if gradient is None else gradient
        for (name, weight), gradient in zip(weights.items(), found, strict=True)
    }
    if not all_finite(loss) or not all(all_finite(each) for each in gradients.values()):
        raise DivergedError(
            f"the loss on a probe batch is {loss.item()} or its gradient is not finite: "
            "check the batch for NaN and the learning rate"
        )
    return gradients


def _places(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each module attribute that holds a parameter or buffer; a tied tensor has several attributes."""
    for prefix, module in model.named_modules():
        yield from module.named_parameters(prefix, recurse=False, remove_duplicate=False)
        yield from module.named_buffers(prefix, recurse=False, remove_duplicate=False)


class _Loss(nn.Module):
    """The loss as a module around the model, so that `functional_call` can replace the model's weights."""

    def __init__(self, model: nn.Module, loss_fn: LossFn) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, batch: Batch) -> Tensor:
        return compute_loss(self.model, self.loss_fn, batch)
