"""Pass a probe's batches through the model one example at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fl_elastic.errors import DivergedError, TrainingError
from fl_elastic.groups import Batch, LossFn, TensorGroup
from fl_elastic.groups.batch import as_pair, map_tensors
from fl_elastic.groups.batch_rows import entries
from fl_elastic.groups.forward import is_sparse
from fl_elastic.groups.torch_private import BatchNorm
from fl_elastic.groups.untouched import untouched


@contextmanager
def norms_at_rest(
    model: nn.Module, groups: Sequence[TensorGroup], loss_fn: LossFn | None = None
) -> Iterator[None]:
    """Let BatchNorm use its running statistics inside the block; restore model and loss at its end.

    Only then is an example's gradient independent of the other examples, and a sum over examples exact. A frozen
    BatchNorm behaves in the same way in training. Inside, the parameters of ``groups`` require a gradient.
    """
    with untouched(model, loss_fn):
        for module in model.modules():
            if isinstance(module, BatchNorm):
                module.training = False
        for group in groups:
            for name in group.parameters:
                model.get_parameter(name).requires_grad_(True)
        yield


def single_examples(model: nn.Module, batches: Sequence[Batch]) -> Iterator[tuple[Batch, int]]:
    """Yield each example of the batches as a batch, with the number of examples in it.

    A batch is passed whole if its tensors differ in their number of examples or are sparse, or if the model has a
    BatchNorm without running statistics.

    Raises
    ------
    TrainingError
        If a batch is not a pair or has no examples.
    """
    joint = any(isinstance(m, BatchNorm) and m.running_mean is None for m in model.modules())
    for batch in batches:
        lengths = _lengths(batch)
        if not lengths or min(lengths) < 1:
            raise TrainingError("a probe batch holds no example: give batches of at least one")
        whole = joint or len(lengths) > 1 or _holds_sparse(batch)
        count = max(lengths)
        if whole:
            yield batch, count
        else:
            yield from ((_example(batch, place), 1) for place in range(count))


def checked_loss(loss: Tensor) -> Tensor:
    """Return the loss of a probe batch; raise DivergedError if it is not finite."""
    if not torch.isfinite(loss):
        raise DivergedError(
            f"the loss on a probe batch is {loss.item()}: check the batch for NaN and the learning rate"
        )
    return loss


def _lengths(batch: Batch) -> set[int]:
    found: set[int] = set()

    def note(tensor: Tensor) -> Tensor:
        found.add(len(tensor) if tensor.dim() else 0)
        return tensor

    map_tensors(note, list(as_pair(batch)))
    return found


def _holds_sparse(batch: Batch) -> bool:
    return any(isinstance(each, Tensor) and is_sparse(each) for _, each in entries(list(batch)))


def _example(batch: Batch, place: int) -> Batch:
    inputs, targets = as_pair(batch)
    return (
        map_tensors(lambda tensor: tensor[place : place + 1], inputs),
        map_tensors(lambda tensor: tensor[place : place + 1], targets),
    )
