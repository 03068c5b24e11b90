"""Call any model on any batch: tensors, tuples or dicts in, outputs to the loss function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fl_elastic.errors import ElasticError, ModelError, TrainingError
from fl_elastic.groups.batch import (
    LABELS,
    as_pair,
    batch_size,
    is_ignored,
    lengths_in,
    map_tensors,
    rebuilt,
)
from fl_elastic.groups.loss_settings import ignored_class, is_of_classes
from fl_elastic.groups.torch_private import refuse_nested, writes_to

Batch: TypeAlias = tuple[Any, Any]
LossFn: TypeAlias = Callable[[Any, Any], Tensor]

# Errors that models raise for unexpected inputs; torchvision's detectors raise AssertionError.
_OF_A_MISFIT = (RuntimeError, ValueError, TypeError, IndexError, AssertionError)
# Most names of inputs in a message.
_SHOWN = 8
_WRITES: WeakKeyDictionary[object, dict[bool, bool]] = WeakKeyDictionary()


def all_finite(tensor: Tensor) -> bool:
    """Return whether every element is a finite number.

    A finite sum has only finite terms, and is twenty times faster than testing each element. If the sum is not
    finite, each element is tested, because a sum of finite terms may overflow.

    Examples
    --------
    >>> all_finite(torch.tensor([1.0, 2.0])), all_finite(torch.tensor([1.0, float("nan")]))
    (True, False)
    >>> all_finite(torch.tensor([3e38, 3e38]))
    True
    """
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def to_device(value: Any, device: torch.device | str) -> Any:
    """Move every tensor inside ``value`` to ``device``, and every object with a method ``to``, such as a graph."""
    if isinstance(value, Mapping):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, Tensor) or callable(getattr(value, "to", None)):
        return value.to(device)
    return rebuilt(value, lambda item: to_device(item, device))


_SPARSE = (
    torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc,
)  # fmt: skip


def is_sparse(tensor: Tensor) -> bool:
    """Return whether a tensor is sparse, that is, stored as indices and values only."""
    return tensor.layout in _SPARSE


def dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the indices and values of a sparse tensor, such as a graph's adjacency; a dense tensor itself.

    >>> [len(dense_parts(each)) for each in (torch.eye(2), torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr())]
    [1, 2, 3]

    Raises
    ------
    ModelError
        If the tensor is nested, see `refuse_nested`.
    """
    refuse_nested(tensor)
    if not is_sparse(tensor):
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor of any dtype as bytes, row after row; for a sparse one those of its indices and values."""
    if is_sparse(tensor):
        return memoryview(b"".join(map(tensor_bytes, dense_parts(tensor.detach()))))
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


def batch_shape(batch: Batch) -> tuple[int, ...]:
    """Return the shape of the first input, which is part of a cost profile's key.

    >>> images = torch.zeros(4, 3, 8, 8)
    >>> batch_shape((images, None)), batch_shape({"labels": torch.zeros(4), "images": images})
    ((4, 3, 8, 8), (4, 3, 8, 8))
    """
    first = first_input(as_pair(batch)[0])
    return () if first is None else _shape(first)


def first_input(inputs: Any) -> Tensor | None:
    """Return the first tensor inside nested tuples, lists and dicts; None if there is none.

    Labels are skipped: models that compute their own loss get labels as inputs, too, often as the first one.
    """
    if isinstance(inputs, Mapping):
        inputs = {name: entry for name, entry in inputs.items() if name != LABELS}
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, inputs)
    return found[0] if found else None


def _shape(tensor: Tensor) -> tuple[int, ...]:
    # The rows of a nested tensor have no common shape.
    return (tensor.size(0),) if tensor.is_nested else tuple(tensor.shape)


def call_model(model: nn.Module, inputs: Any, examples: int | None = None) -> Any:
    """Call ``model`` on ``inputs``.

    A dict is passed as keyword arguments if its keys are parameters of ``forward``, without ``labels`` if
    ``forward`` has no such parameter. A tuple or list is passed as positional arguments if ``forward`` takes that
    many, unless its entries are the examples (see `batch_size`). Otherwise the inputs are passed as one argument. A
    model that modifies its inputs in place gets copies.

    Parameters
    ----------
    model : nn.Module
        Called in its present mode.
    inputs : any
        Inputs of a batch.
    examples : int, optional
        Number of examples in the batch, if known.
    """
    with _unwritten(model, inputs) as given:
        return _called(model, given, examples)


def _called(model: nn.Module, inputs: Any, examples: int | None) -> Any:
    positional: tuple[Any, ...] = ()
    named: dict[str, Any] = {}
    if isinstance(inputs, Mapping):
        named = {str(key): item for key, item in inputs.items()}
    elif isinstance(inputs, (tuple, list)) and not is_one_argument(inputs, examples):
        positional = tuple(inputs)
    else:
        return model(inputs)
    if _takes(model, *positional, **named):
        return model(*positional, **named)
    if LABELS in named:
        rest = {key: item for key, item in named.items() if key != LABELS}
        if _takes(model, **rest):
            return model(**rest)
    return model(inputs)


def scores_of(outputs: Any) -> Tensor | None:
    """Return the outputs if they are a tensor, or else their ``logits`` (class scores of transformers' models)."""
    if isinstance(outputs, Mapping):
        outputs = outputs.get("logits")
    found = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)
    return found if isinstance(found, Tensor) else None


def is_one_argument(inputs: Sequence[Any], examples: int | None) -> bool:
    """Return whether a sequence is one argument of a model, that is, whether its entries are the examples."""
    if isinstance(inputs, PackedSequence):
        return True
    if examples is None or len(inputs) != examples:
        return False
    return not any(_may_be_of_all(input_, examples) for input_ in inputs)


def _may_be_of_all(entry: Any, examples: int) -> bool:
    """Return whether an entry may be one of several model inputs that each hold all examples of a batch."""
    if isinstance(entry, str | bytes):
        return False
    if isinstance(entry, Tensor | np.ndarray):
        # The entry has a row per example, or a column per example if time comes first.
        return not entry.ndim or examples in entry.shape[: 2 if entry.ndim > 2 else 1]
    if isinstance(entry, tuple | list) and len(entry) == examples:
        return True
    return not isinstance(entry, Mapping | tuple | list) or examples in lengths_in(entry)


def _takes(model: nn.Module, *positional: Any, **named: Any) -> bool:
    try:
        inspect.signature(model.forward).bind(*positional, **named)
    except TypeError:
        return False
    return True


@contextmanager
def refusing_misfits(batch: Batch) -> Iterator[None]:
    """Turn torch's errors about a batch that does not fit into a TrainingError that names dtypes and shapes."""
    try:
        yield
    except (ElasticError, torch.OutOfMemoryError):
        raise
    except _OF_A_MISFIT as error:
        inputs, targets = as_pair(batch)
        given = (
            f"{_described('inputs', inputs)}{_entries(inputs)} and {_described('targets', targets)}"
        )
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise TrainingError(f"model and loss cannot take a batch with {given}: {reason}") from error


def _described(what: str, given: Any) -> str:
    """Describe the inputs or targets of a batch, for an error message."""
    first = first_input(given)
    if first is None:
        return f"{what} of type {type(given).__name__} without a tensor"
    return f"{str(first.dtype).removeprefix('torch.')} {what} of shape {_shape(first)}"


def _entries(inputs: Any) -> str:
    """Describe the container that holds the inputs, for an error message; empty for a single input."""
    if isinstance(inputs, Mapping):
        return f" in a dict of {', '.join(map(repr, list(inputs)[:_SHOWN]))}"
    if isinstance(inputs, list):
        return f" in a list of {len(inputs)}"
    if isinstance(inputs, tuple) and not isinstance(inputs, PackedSequence):
        return (
            f" in a tuple of {len(inputs)} (of a batch of three entries or more, all but the last)"
        )
    return ""


def channels_last(tensor: Tensor) -> Tensor:
    """Return a batch of images laid out channels last, anything else as it is."""
    if tensor.dim() == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor


def compute_loss(model: nn.Module, loss_fn: LossFn, batch: Batch) -> Tensor:
    """Return the scalar loss of ``model`` on one ``(inputs, targets)`` batch; see `outputs_and_loss`."""
    return outputs_and_loss(model, loss_fn, batch)[1]


@contextmanager
def _unwritten(called: object, inputs: Any) -> Iterator[Any]:
    """Yield the inputs of a model or loss, or copies of them if it modifies its inputs in place.

    This is tested at the first call in train mode and at the first in eval mode; if the inputs were modified once,
    they are always copied.
    """
    mode = bool(getattr(called, "training", True))
    try:
        known = _WRITES.setdefault(called, {})
    except TypeError:
        # An object that cannot be a key of this dictionary is tested at each call.
        known = {}
    writes = known.get(mode)
    versions: list[tuple[Tensor, int]] = []

    def watched(tensor: Tensor) -> Tensor:
        # A tensor with an autograd node is already a copy, see `loss_from_inputs`; copying it again would add a
        # node.
        given = tensor if writes is False or tensor.grad_fn is not None else tensor.clone()
        versions.append((given, writes_to(given)))
        return given

    given = map_tensors(watched, inputs)
    # Inputs that are not copied are watched as well, because the model may modify its inputs in a later call.
    ended = False
    try:
        yield given
        ended = True
    finally:
        wrote = any(writes_to(tensor) != before for tensor, before in versions)
        if wrote or (ended and writes is None):
            known[mode] = wrote


def outputs_and_loss(model: nn.Module, loss_fn: LossFn, batch: Batch) -> tuple[Any, Tensor]:
    """Return the outputs of ``model`` for one ``(inputs, targets)`` batch, and the scalar loss.

    Raises
    ------
    TrainingError
        If the batch is not a pair, or does not fit the model or the loss.
    ModelError
        If ``loss_fn`` does not return one number.
    """
    inputs, targets = as_pair(batch)
    with refusing_misfits(batch), _unwritten(model, inputs) as given:
        listed = isinstance(inputs, (tuple, list))
        outputs = _called(model, given, batch_size(batch) if listed else None)
        _refuse_unknown_classes(loss_fn, outputs, targets)
        loss = loss_of(loss_fn, outputs, targets)
    return outputs, one_number(loss)


def loss_of(loss_fn: LossFn, outputs: Any, targets: Any) -> Any:
    """Return the value of a loss; if it modifies outputs or targets in place, it gets copies.

    The originals are needed: a batch may be used several times, and outputs are compared with targets after the
    loss.
    """
    # Outputs of other kinds may be objects of the model's own.
    plain = isinstance(outputs, Tensor)
    with _unwritten(loss_fn, (outputs if plain else None, targets)) as (scores, wanted):
        return loss_fn(scores if plain else outputs, wanted)


def one_number(loss: Any) -> Tensor:
    """Return a loss as a tensor of shape (); raise ModelError if it is not one number."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        seen = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ModelError(f"loss_fn must return one number as a tensor, got {seen}")
    return loss.reshape(())


def _refuse_unknown_classes(loss_fn: LossFn, outputs: Any, targets: Any) -> None:
    """Raise IndexError for a class without a model output, before an accelerator sees it.

    The CPU raises this error itself. On CUDA the error makes the device unusable for the process, so that the model
    could not even be restored.
    """
    ignored = ignored_class(loss_fn)
    if not (is_of_classes(loss_fn) and isinstance(outputs, Tensor) and isinstance(targets, Tensor)):
        return
    if targets.device.type == "cpu" or targets.is_floating_point() or not outputs.dim():
        return
    classes = outputs.shape[min(1, outputs.dim() - 1)]
    unknown = ((targets < 0) | (targets >= classes)) & ~is_ignored(targets, ignored)
    if bool(unknown.any()):
        raise IndexError(f"Target {int(targets[unknown][0])} is out of bounds.")
