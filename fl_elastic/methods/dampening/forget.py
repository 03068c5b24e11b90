"""Make a model forget examples without training, by the rule of `fl_elastic.update.dampening`."""

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
from fl_elastic.groups.batch import as_pair, counted
from fl_elastic.groups.forward import compute_loss, to_device
from fl_elastic.groups.loss_settings import example_counter
from fl_elastic.groups.model_state import ModelState
from fl_elastic.groups.sample_ids import sample_ids
from fl_elastic.groups.untouched import same_start, untouched
from fl_elastic.planning.importance.samples import checked_loss, single_examples
from fl_elastic.profiling.profile import model_device
from fl_elastic.training.loader import check_loader, within
from fl_elastic.update.dampening import SquaredGradients, dampening_factors


def squared_gradients(
    model: nn.Module,
    loss_fn: LossFn,
    loader: Iterable[Batch],
    *,
    seconds: float = math.inf,
) -> SquaredGradients:
    """Sum the squared gradients of all examples of a loader, one by one, with the model in eval mode.

    Each example's gradient is scaled to length 1, so that all examples have equal weight: otherwise examples that
    the model gets wrong would have far larger gradients at every weight than examples that it classifies with
    certainty. The published method does not scale. Each example takes one forward and one backward pass. The model
    is left unchanged.

    Parameters
    ----------
    model : nn.Module
        Parameters that require no gradient are left out.
    loss_fn : callable
        ``loss_fn(outputs, targets)``, a mean over the examples of a batch; use `fl_elastic.losses.squared_outputs`
        if examples have no label.
    loader : iterable of batch
        As for training, without random changes of the examples.
    seconds : float
        No batch is begun after this many seconds; the sums then cover a part of the examples.

    Raises
    ------
    TrainingError
        If there is no loader or no example, or a loss or a gradient is not finite.
    ModelError
        If no parameter requires a gradient.

    Examples
    --------
    >>> model = nn.Linear(1, 1, bias=False)
    >>> batch = (torch.tensor([[1.0], [3.0]]), torch.zeros(2))
    >>> mean = lambda outputs, targets: outputs.mean()
    >>> found = squared_gradients(model, mean, [batch])
    >>> found.sums["weight"].item(), found.examples
    (2.0, 2)
    """
    check_loader(loader)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise ModelError(
            "no parameter of the model requires a gradient: set requires_grad on the parameters that are to forget"
        )
    examples, device, counter = 0, model_device(model), example_counter(loss_fn)
    with untouched(model, loss_fn), same_start(model), torch.enable_grad():
        sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in parameters.items()}
        model.eval()
        for batch, counting, _ in within(counter.over(loader), seconds):
            if not counting:
                continue
            for part, count in single_examples(model, [to_device(batch, device)]):
                if not counter.counting(part, count):
                    continue
                if count > 1:
                    raise TrainingError(
                        "this batch cannot be taken apart into examples: its tensors are of unequal length, or a "
                        "norm of the model has no statistics of its own"
                    )
                checked_loss(compute_loss(model, loss_fn, part)).backward()  # type: ignore[no-untyped-call]
                examples += 1
                found = {n: p.grad.detach() for n, p in parameters.items() if p.grad is not None}
                longest = _length(found.values())
                for name, gradient in found.items():
                    parameters[name].grad = None
                    if longest > 0:
                        sums[name] += (gradient.float() / longest) ** 2
    if not examples:
        raise TrainingError("there is no example to take gradients of: the loader gave no batch")
    return SquaredGradients({name: array.cpu().numpy() for name, array in sums.items()}, examples)


def _length(gradients: Collection[Tensor]) -> float:
    # In fp32 the squares of small gradients underflow to 0.
    largest = max(float(gradient.abs().max()) for gradient in gradients)
    if not largest:
        return 0.0
    return largest * math.sqrt(sum(float((g.float() / largest).square().sum()) for g in gradients))


def digest_of(loader: Iterable[Batch], client: str) -> str:
    """Return a digest of a client's name and examples that does not depend on the examples' order or batches.

    Examples
    --------
    >>> x, y = torch.arange(6.0).reshape(3, 2), torch.tensor([0, 1, 2])
    >>> digest_of([(x, y)], "") == digest_of([(x[2:], y[2:]), (x[:2].flip(0), y[:2].flip(0))], "")
    True
    """
    examples = sorted(
        sample_id for batch, _ in counted(loader) for sample_id in sample_ids(as_pair(batch))
    )
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
    """Return the squared gradients of all of a client's examples, and those of examples to be forgotten if any.

    All examples include those to be forgotten. A tied tensor is listed under each of its names.

    Parameters
    ----------
    model, loss_fn, loader
        As in `squared_gradients`; the loader no longer holds the examples to be forgotten.
    forget : iterable of batch, optional
        Examples to be forgotten; all of them are processed, however long it takes.
    examples : int
        Number of examples of the loader; the sums of those that are processed in time are scaled to this number.
    seconds : float
        Time for both; at least one batch of the loader is processed, and none is begun after this time.

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
        forgotten = split_over_names(model, forgotten)
    return split_over_names(model, everything), forgotten


def split_over_names(model: nn.Module, squares: SquaredGradients) -> SquaredGradients:
    """Return the squares with a tied parameter under each of its names: a server does not know that it is tied.

    Each name gets an equal share, so that an example's squares still add up to one.
    """
    names = ModelState.of(model).by_module_name
    sums = {
        name: array / np.float32(len(names[own]))
        for own, array in squares.sums.items()
        for name in names[own]
    }
    return SquaredGradients(sums, squares.examples)


def dampen(
    model: nn.Module,
    forgotten: SquaredGradients,
    everything: SquaredGradients,
    *,
    alpha: float | None = None,
) -> dict[str, int]:
    """Shrink weights that are more important to the forgotten examples than to all; return their number by tensor.

    See `fl_elastic.update.dampening.dampening_factors` for the rule and the meaning of its numbers.

    Parameters
    ----------
    model : nn.Module
        Changed in place.
    forgotten, everything : SquaredGradients
        Squares for the examples to be forgotten, and for all training examples, including these.
    alpha : float, optional
        Factor by which a weight must be more important; by default derived from the share of examples to be
        forgotten.

    Raises
    ------
    UpdateError
        If a number is invalid, a sum is of another model, ``everything`` does not contain ``forgotten``, or
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
    factors = dampening_factors(forgotten, everything, alpha=alpha)
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
) -> dict[str, int]:
    """Make a model forget some of its training examples, without training; return shrunk weights by tensor.

    See `squared_gradients` and `dampen` for parameters and errors. This does not prove that nothing can be learned
    about the examples, and the model may get worse on others: test both, on a copy of the model first. It changes
    little for examples that resemble many others, which a model trained without them would also get right.
    """
    few = squared_gradients(model, loss_fn, forgotten)
    return dampen(model, few, squared_gradients(model, loss_fn, everything), alpha=alpha)
