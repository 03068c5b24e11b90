"""Let a model forget examples that it was trained on, without training (`fl_elastic.update.squared_gradients`)."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Collection, Iterable

import numpy as np
import torch
from torch import Tensor, nn

from fl_elastic.errors import ModelError, TrainingError, UpdateError
from fl_elastic.groups import Batch, LossFn
from fl_elastic.groups.forward import compute_loss, to_device
from fl_elastic.groups.model_state import ModelState
from fl_elastic.groups.pairs import as_pair
from fl_elastic.groups.sample_ids import sample_ids
from fl_elastic.groups.untouched import untouched
from fl_elastic.planning.importance.samples import checked_loss, micro_batches
from fl_elastic.profiling.profile_key import model_device
from fl_elastic.training.batches import within
from fl_elastic.update.squared_gradients import SquaredGradients, dampening

__all__ = [
    "SquaredGradients",
    "dampen",
    "digest_of",
    "forget",
    "squared_gradients",
    "squares_with",
    "under_every_name",
]


def squared_gradients(
    model: nn.Module,
    loss_fn: LossFn,
    loader: Iterable[Batch],
    *,
    alike: bool = True,
    seconds: float = math.inf,
) -> SquaredGradients:
    """Add up the squared gradients of all examples of a loader, one by one, with the model in eval mode.

    The model is left as it was. It takes a pass forwards and backwards for each example.

    Parameters
    ----------
    model : nn.Module
        Parameters that require no gradient are left out.
    loss_fn : callable
        ``loss_fn(outputs, targets)``, a mean over the examples of a batch; `fl_elastic.losses.squared_outputs`
        where examples have no label.
    loader : iterable of batch
        As for training, without random changes of the examples.
    alike : bool
        Whether each example's gradient is brought to length 1, so that all examples count alike: those that the
        model gets wrong have far larger gradients at every weight than those that it is certain of. As published,
        they are as long as they are.
    seconds : float
        No batch is begun after that time; squares of some of the examples are squares as well.

    Raises
    ------
    TrainingError
        If there is no example, or a loss or a gradient is not finite.
    ModelError
        If no parameter requires a gradient.

    Examples
    --------
    >>> model = nn.Linear(1, 1, bias=False)
    >>> batch = (torch.tensor([[1.0], [3.0]]), torch.zeros(2))
    >>> mean = lambda outputs, targets: outputs.mean()
    >>> found = squared_gradients(model, mean, [batch], alike=False)
    >>> found.sums["weight"].item(), found.examples
    (10.0, 2)
    >>> squared_gradients(model, mean, [batch]).sums["weight"].item()
    2.0
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise ModelError(
            "no parameter of the model requires a gradient: set requires_grad on what shall forget"
        )
    sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in parameters.items()}
    examples, device = 0, model_device(model)
    with untouched(model), torch.enable_grad():
        model.eval()
        for batch in within(loader, seconds):
            for part, count in micro_batches(model, [to_device(batch, device)], 1):
                if count > 1:
                    raise TrainingError(
                        "this batch cannot be taken apart into examples: its tensors are of unequal length, or a "
                        "norm of the model has no statistics of its own"
                    )
                checked_loss(compute_loss(model, loss_fn, part)).backward()  # type: ignore[no-untyped-call]
                examples += 1
                found = {n: p.grad.detach() for n, p in parameters.items() if p.grad is not None}
                longest = _length(found.values()) if alike else 1.0
                for name, gradient in found.items():
                    parameters[name].grad = None
                    if longest > 0:
                        sums[name] += (gradient.float() / longest) ** 2
    if not examples:
        raise TrainingError("there is no example to take gradients of: the loader gave no batch")
    return SquaredGradients({name: each.cpu().numpy() for name, each in sums.items()}, examples)


def _length(gradients: Collection[Tensor]) -> float:
    # In fp32 the squares of small gradients are 0.
    largest = max(float(each.abs().max()) for each in gradients)
    if not largest:
        return 0.0
    return largest * math.sqrt(sum(float((g.float() / largest).square().sum()) for g in gradients))


def digest_of(loader: Iterable[Batch], client: str) -> str:
    """Return a digest of a client's examples, whatever their order and the batches that they come in.

    Examples
    --------
    >>> x, y = torch.arange(6.0).reshape(3, 2), torch.tensor([0, 1, 2])
    >>> digest_of([(x, y)], "") == digest_of([(x[2:], y[2:]), (x[:2].flip(0), y[:2].flip(0))], "")
    True
    """
    examples = sorted(each for batch in loader for each in sample_ids(as_pair(batch)))
    found = hashlib.blake2b(client.encode(), digest_size=16)
    found.update(repr(examples).encode())
    return found.hexdigest()


def squares_with(
    model: nn.Module,
    loss_fn: LossFn,
    loader: Iterable[Batch],
    forget: Iterable[Batch] | None,
    *,
    examples: int,
    seconds: float,
) -> tuple[SquaredGradients, SquaredGradients | None]:
    """Return the squared gradients of all examples of a client, and of those to be forgotten, if there are any.

    Those to be forgotten are among all; each tensor stands under every name that the model has for it.

    Parameters
    ----------
    model, loss_fn, loader
        As `squared_gradients` takes them; the loader no longer holds what is to be forgotten.
    forget : iterable of batch, optional
        Looked at whole, however long it takes: it is what is asked for.
    examples : int
        Of the loader: those that are reached in the time speak for all.
    seconds : float
        For both; no batch of the loader is begun after that time, but one.

    Raises
    ------
    TrainingError, ModelError
        As `squared_gradients` does.
    """
    began, forgotten = time.monotonic(), None
    if forget is not None:
        forgotten = squared_gradients(model, loss_fn, forget)
    left = max(seconds - (time.monotonic() - began), 0.0)
    seen = squared_gradients(model, loss_fn, loader, seconds=left)
    everything = seen.standing_for(max(examples, seen.examples))
    if forgotten is not None:
        everything = everything + forgotten
        forgotten = under_every_name(model, forgotten)
    return under_every_name(model, everything), forgotten


def under_every_name(model: nn.Module, squares: SquaredGradients) -> SquaredGradients:
    """Return the squares of a tied parameter under each of its names: a server does not know that it is one.

    Each name has its part of them, so that an example's squares still add up to one.
    """
    names = ModelState.of(model).by_module_name
    sums = {
        name: each / np.float32(len(names[own]))
        for own, each in squares.sums.items()
        for name in names[own]
    }
    return SquaredGradients(sums, squares.examples)


def dampen(
    model: nn.Module,
    forgotten: SquaredGradients,
    everything: SquaredGradients,
    *,
    alpha: float | None = None,
    strength: float = 1.0,
) -> dict[str, int]:
    """Make smaller what matters more to the forgotten examples than to all; return how many weights it was.

    See `fl_elastic.update.squared_gradients.dampening` for the rule, and the meaning of its numbers.

    Parameters
    ----------
    model : nn.Module
        Changed in place.
    forgotten, everything : SquaredGradients
        Of the examples to be forgotten, and of all that the model was trained on, these included.
    alpha : float, optional
        How many times as much a weight must matter; by the share of examples that are to be forgotten if left out.
    strength : float
        How far it stays.

    Raises
    ------
    UpdateError
        If a number means nothing, a sum is of another model, ``everything`` does not contain ``forgotten``, or
        ``alpha`` is so large that it selects no weight.

    Examples
    --------
    >>> import numpy as np
    >>> model = nn.Linear(2, 1, bias=False)
    >>> _ = nn.init.ones_(model.weight)
    >>> few = SquaredGradients({"weight": np.float32([[8.0, 1.0]])}, 1)
    >>> dampen(model, few, SquaredGradients({"weight": np.float32([[8.0, 4.0]])}, 4))
    {'weight': 1}
    >>> model.weight.tolist()
    [[0.25, 1.0]]
    """
    parameters = dict(model.named_parameters())
    for sums in (forgotten.sums, everything.sums):
        if any(
            n not in parameters or tuple(parameters[n].shape) != s.shape for n, s in sums.items()
        ):
            raise UpdateError("these squared gradients are of another model: its parameters differ")
    factors = dampening(forgotten, everything, alpha=alpha, strength=strength)
    with torch.no_grad():
        for name, factor in factors.items():
            parameter = parameters[name]
            parameter.mul_(torch.from_numpy(factor).to(parameter.device, parameter.dtype))
    return {name: int((factor != 1.0).sum()) for name, factor in factors.items()}


def forget(
    model: nn.Module,
    loss_fn: LossFn,
    forgotten: Iterable[Batch],
    everything: Iterable[Batch],
    *,
    alpha: float | None = None,
    strength: float = 1.0,
) -> dict[str, int]:
    """Let a model forget some of its training examples, without training; return how many weights of each tensor.

    See `squared_gradients` and `dampen` for parameters and errors. It is no proof that nothing can be told of the
    examples, and others may suffer: test both, on a copy of the model first. Of examples like many others, which a
    model without them would know as well, it changes little.
    """
    few = squared_gradients(model, loss_fn, forgotten)
    return dampen(
        model, few, squared_gradients(model, loss_fn, everything), alpha=alpha, strength=strength
    )
