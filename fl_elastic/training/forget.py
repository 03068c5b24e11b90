"""Let a model forget examples that it was trained on, by selective synaptic dampening.

Foster, Schoepf and Brintrup, "Fast machine unlearning without retraining through selective synaptic dampening",
AAAI 2024: weights that matter far more to what is to be forgotten than to everything are made smaller, and nothing
is trained again. What a weight matters is the diagonal of the Fisher information. The published code takes squares
of gradients of whole batches, which depend on the size of a batch; here they are of single examples, so that sums
over devices are those of all examples together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fl_elastic.errors import TrainingError
from fl_elastic.groups import Batch, LossFn
from fl_elastic.groups.forward import compute_loss, to_device
from fl_elastic.groups.untouched import untouched
from fl_elastic.importance.samples import checked_loss, micro_batches
from fl_elastic.profiling.measure import model_device

__all__ = ["SquaredGradients", "dampen", "forget", "squared_gradients"]


@dataclass(frozen=True, eq=False)
class SquaredGradients:
    """Squared gradients of single examples, added up.

    Those of several devices, or of several data sets, are added by ``+``.

    Attributes
    ----------
    sums : dict of str to Tensor
        By parameter, of its shape.
    examples : int
        How many examples they are of.

    Raises
    ------
    TrainingError
        If they are none: of no example, negative or not finite. A device may say anything.
    """

    sums: Mapping[str, Tensor]
    examples: int

    def __post_init__(self) -> None:
        if self.examples < 1:
            raise TrainingError(f"squared gradients of {self.examples} examples: take at least one")
        for name, each in self.sums.items():
            if not bool(torch.isfinite(each).all()) or bool((each < 0).any()):
                raise TrainingError(
                    f"the squared gradients of {name!r} are negative or not finite: check the model's weights and "
                    "the examples, or leave out the device that sent them"
                )

    def __add__(self, other: SquaredGradients) -> SquaredGradients:
        """Return those of both; TrainingError if they are of other parameters."""
        if {n: s.shape for n, s in self.sums.items()} != {
            n: s.shape for n, s in other.sums.items()
        }:
            raise TrainingError(
                "squared gradients of two models cannot be added: their parameters differ"
            )
        sums = {name: each + other.sums[name] for name, each in self.sums.items()}
        return SquaredGradients(sums, self.examples + other.examples)


def squared_gradients(
    model: nn.Module, loss_fn: LossFn, loader: Iterable[Batch]
) -> SquaredGradients:
    """Add up the squared gradients of all examples of a loader, one by one, with the model in eval mode.

    The model is left as it was. It takes a pass forwards and backwards for each example.

    Parameters
    ----------
    model : nn.Module
        Parameters that require no gradient are left out.
    loss_fn : callable
        ``loss_fn(outputs, targets)``, a mean over the examples of a batch.
    loader : iterable of batch
        As for training, without random changes of the examples.

    Raises
    ------
    TrainingError
        If there is no example, or a loss or a gradient is not finite.

    Examples
    --------
    >>> model = nn.Linear(1, 1, bias=False)
    >>> batch = (torch.tensor([[1.0], [3.0]]), torch.zeros(2))
    >>> found = squared_gradients(model, lambda outputs, targets: outputs.mean(), [batch])
    >>> found.sums["weight"].item(), found.examples
    (10.0, 2)
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in parameters.items()}
    examples, device = 0, model_device(model)
    with untouched(model):
        model.eval()
        for batch in loader:
            for part, count in micro_batches(model, [to_device(batch, device)], 1):
                if count > 1:
                    raise TrainingError(
                        "this batch cannot be taken apart into examples: its tensors are of unequal length, or a "
                        "norm of the model has no statistics of its own"
                    )
                checked_loss(compute_loss(model, loss_fn, part)).backward()  # type: ignore[no-untyped-call]
                examples += 1
                for name, parameter in parameters.items():
                    if parameter.grad is not None:
                        sums[name] += parameter.grad.detach().float() ** 2
                        parameter.grad = None
    if not examples:
        raise TrainingError("there is no example to take gradients of: the loader gave no batch")
    return SquaredGradients(sums, examples)


def dampen(
    model: nn.Module,
    forgotten: SquaredGradients,
    everything: SquaredGradients,
    *,
    alpha: float = 3.0,
    strength: float = 1.0,
) -> dict[str, int]:
    r"""Make smaller what matters more to the forgotten examples than to all; return how many weights it was.

    With mean squares :math:`I_f` and :math:`I_D`, a weight with :math:`I_f > \alpha I_D` is multiplied by
    :math:`\min(1, \lambda I_D / I_f)`. Since all examples contain the forgotten ones, :math:`I_f / I_D` is at most
    their number over that of the forgotten ones.

    Parameters
    ----------
    model : nn.Module
        Changed in place.
    forgotten, everything : SquaredGradients
        Of the examples to be forgotten, and of all that the model was trained on, these included.
    alpha : float
        Above 0. Smaller forgets more and costs more of what is kept.
    strength : float
        :math:`\lambda`, above 0.

    Raises
    ------
    TrainingError
        If a number means nothing, a sum is of another model, or ``alpha`` is so large that it selects no weight.

    Examples
    --------
    >>> model = nn.Linear(2, 1, bias=False)
    >>> _ = nn.init.ones_(model.weight)
    >>> few = SquaredGradients({"weight": torch.tensor([[8.0, 1.0]])}, 1)
    >>> dampen(model, few, SquaredGradients({"weight": torch.tensor([[8.0, 4.0]])}, 4))
    {'weight': 1}
    >>> model.weight.tolist()
    [[0.25, 1.0]]
    """
    if not alpha > 0 or not strength > 0:
        raise TrainingError(f"alpha {alpha} and strength {strength} must be above 0")
    parameters = dict(model.named_parameters())
    for sums in (forgotten.sums, everything.sums):
        if any(
            name not in parameters or parameters[name].shape != s.shape for name, s in sums.items()
        ):
            raise TrainingError(
                "these squared gradients are of another model: its parameters differ"
            )
    if set(forgotten.sums) != set(everything.sums):
        raise TrainingError("the squared gradients of the two are of other parameters")
    most = everything.examples / forgotten.examples
    if alpha >= most:
        raise TrainingError(
            f"alpha {alpha:g} selects nothing: {forgotten.examples} of {everything.examples} examples are to be "
            f"forgotten, so that a weight matters at most {most:.3g} times as much to them; give less than that"
        )
    found: dict[str, int] = {}
    with torch.no_grad():
        for name, squares in forgotten.sums.items():
            parameter = parameters[name]
            own = (squares / forgotten.examples).to(parameter.device)
            all_of_them = (everything.sums[name] / everything.examples).to(parameter.device)
            selected = own > alpha * all_of_them
            factor = (strength * all_of_them / own).clamp(max=1.0)
            parameter.mul_(torch.where(selected, factor, 1.0).to(parameter.dtype))
            found[name] = int(selected.sum())
    return found


def forget(
    model: nn.Module,
    loss_fn: LossFn,
    forgotten: Iterable[Batch],
    everything: Iterable[Batch],
    *,
    alpha: float = 3.0,
    strength: float = 1.0,
) -> dict[str, int]:
    """Let a model forget some of its training examples, without training; return how many weights of each tensor.

    See `squared_gradients` and `dampen` for parameters and errors. It is no proof that nothing can be told of the
    examples, and others may suffer: test both, on a copy of the model first. Of examples like many others, which a
    model without them would know as well, it changes little.

    Notes
    -----
    The default of ``alpha`` was chosen on handwritten digits, where each class was forgotten by two well-trained
    models: accuracy on it fell from above 0.9 to 0.015 in the mean, and on the others by 0.017, once by 0.26. Two
    models that were trained for eight instead of twenty passes kept 0.33 on what they were to forget.
    """
    few = squared_gradients(model, loss_fn, forgotten)
    return dampen(
        model, few, squared_gradients(model, loss_fn, everything), alpha=alpha, strength=strength
    )
