"""Batches: inputs and targets in any form that loaders yield, and the number of examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import BatchSampler, default_collate

from fl_elastic.errors import TrainingError

LABELS = "labels"
"""Name that transformers models use for targets, from which they compute their own loss."""

IGNORED = -100
"""Class that torch's classification losses, and with them transformers' models, ignore by default."""

CountExamples: TypeAlias = Callable[[Any, Any], int]
"""``count_examples(inputs, targets)`` returns the number of examples in a batch."""

# Batches of graphs store their number of graphs under one of these names (PyTorch Geometric, DGL).
_GRAPHS = ("num_graphs", "batch_size")
_TARGETS = ("label", "targets", "target")
_CLASSES = (torch.uint8, torch.int16, torch.int32, torch.int64)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply ``function`` to every tensor inside nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, PackedSequence):
        # The batch sizes of a packed sequence stay on the CPU: they are numbers, not data.
        return value._replace(data=function(value.data))
    return rebuilt(value, lambda item: map_tensors(function, item))


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a tuple or list of the same kind with its entries changed; any other value unchanged."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(change, value))
    return type(value)(map(change, value)) if isinstance(value, (tuple, list)) else value


def as_pair(batch: Any) -> tuple[Any, Any]:
    """Return inputs and targets of a batch.

    A batch of two entries is the pair. If there are more entries, the last one is the targets, and the others are
    the inputs. In a mapping the targets are ``labels``, or ``label``, ``targets`` or ``target``. ``labels`` stay
    among the inputs as well, because models that know this name compute their loss from them; the others are
    removed. A single remaining input is returned alone.

    Raises
    ------
    TrainingError
        If a mapping has no such entry, or the batch has another form.

    Examples
    --------
    >>> as_pair((1, 2)), as_pair([[1], [2], [3]]), as_pair({"image": 1, "label": 2})
    ((1, 2), (([1], [2]), [3]), (1, 2))
    >>> as_pair({"input_ids": 1, "labels": 2})
    ({'input_ids': 1, 'labels': 2}, 2)
    """
    if isinstance(batch, Mapping):
        return _from_mapping({str(name): value for name, value in batch.items()})
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    examples = (Tensor, Mapping, tuple, list)
    if (
        isinstance(batch, (tuple, list))
        and len(batch) > 2
        and all(isinstance(each, examples) for each in batch)
    ):
        return tuple(batch[:-1]), batch[-1]
    seen = type(batch).__name__ + (f" of {len(batch)}" if hasattr(batch, "__len__") else "")
    raise TrainingError(
        "a batch must be a pair (inputs, targets), a longer tuple that ends with the targets, or a dict with "
        f"labels, got {seen}"
    )


def _from_mapping(entries: dict[str, Any]) -> tuple[Any, Any]:
    if LABELS in entries:
        return entries, entries[LABELS]
    for name in _TARGETS:
        if name in entries and len(entries) > 1:
            inputs = {each: value for each, value in entries.items() if each != name}
            return (next(iter(inputs.values())) if len(inputs) == 1 else inputs), entries[name]
    raise TrainingError(
        f"a batch that is a dict needs targets under one of {[LABELS, *_TARGETS]} beside inputs, got "
        f"{sorted(entries)[:8]}"
    )


def batch_size(batch: Any, count_examples: CountExamples | None = None) -> int:
    """Return the number of examples in a batch.

    Targets are counted, because there is one per example, while the first axis of inputs may be time steps, tokens
    or nodes. If there are several targets per example, as for tokens, or none, inputs are counted. A target that is
    a single number belongs to one example. Two lists of equal length, such as pictures and boxes, have one entry
    per example, and so does a list of targets with stacked inputs.

    Parameters
    ----------
    batch : batch
        See `as_pair`; None and an empty list have no example.
    count_examples : callable, optional
        ``count_examples(inputs, targets)``; if given, it decides.

    Raises
    ------
    TrainingError
        If ``count_examples`` does not return a count.

    Examples
    --------
    >>> import torch
    >>> time_major, classes = torch.zeros(20, 4, 3), torch.zeros(4)
    >>> batch_size((time_major, classes))
    4
    >>> pictures, boxes = [torch.zeros(3, 8, 8)] * 5, [{"boxes": torch.zeros(2, 4)}] * 5
    >>> batch_size((pictures, boxes)), batch_size(((torch.zeros(8, 3), torch.zeros(8)), torch.zeros(8)))
    (5, 8)
    >>> batch_size((torch.zeros(3, 3, 8, 8), [{"boxes": torch.zeros(k, 4)} for k in (2, 0, 5)]))
    3
    """
    if batch is None or (isinstance(batch, (tuple, list)) and not batch):
        # A collate function returns this if it has left out every example.
        return 0
    inputs, targets = as_pair(batch)
    if count_examples is not None:
        return _checked(count_examples(inputs, targets))
    if _is_listed(inputs) and _is_listed(targets) and len(inputs) == len(targets):
        alike = _of_one_kind(inputs) and _of_one_kind(targets)
        if alike and not _of_all_examples([*inputs, *targets]):
            return len(inputs)
    told, given = list(lengths_in(targets)), list(lengths_in(inputs))
    if _is_listed(targets) and len(targets) in given:
        # One entry per example, such as its boxes or words, unless each entry has a row per example.
        common = set(told) if _of_all_examples(targets) else set()
        if not common or not common <= {*given, *_second_lengths(inputs)}:
            return len(targets)
    if isinstance(targets, Tensor) and not targets.dim():
        # A single example, as from a DataLoader without batching, or a bag of instances.
        return 1
    if not told:
        # The shortest tensor: the inputs of an EmbeddingBag are one offset per bag, and a larger number of words.
        return min(given, default=1)
    if len(set(told)) > 1:
        found = [each for each in told if each in given] or [min(told)]
        # With time-major sequences, the number of concatenated labels may equal that of time steps.
        columns = _second_lengths(inputs, axes=3)
        told = [min(each for each in told if each in columns or each == found[0])]
    count = told[0]
    if not given or count <= max(given) or count in _second_lengths(inputs):
        return count
    if _is_listed(inputs) and count == len(inputs):
        return count
    # Several targets per example, concatenated.
    return given[0]


def counted(
    loader: Iterable[Any], count_examples: CountExamples | None = None
) -> Iterator[tuple[Any, int]]:
    """Yield the batches of a loader that have examples, each with their number.

    The number is at most that of the examples that a DataLoader draws, if this is known: a count of targets may be
    larger, because their first axis may be time. Tensors are copied if the loader may reuse their memory for its
    next batch.

    Examples
    --------
    >>> import torch
    >>> sequences = torch.utils.data.TensorDataset(torch.zeros(3, 20), torch.zeros(3, 20))
    >>> def time_major(pairs):
    ...     return [torch.stack(each, dim=1) for each in zip(*pairs)]
    >>> loader = torch.utils.data.DataLoader(sequences, batch_size=2, collate_fn=time_major)
    >>> [size for _, size in counted(loader)]
    [2, 1]
    """
    drawn = None if count_examples is not None else _drawn_sizes(loader)
    stays = _makes_new_batches(loader)
    for given in loader:
        batch = given if stays else map_tensors(Tensor.clone, given)
        size = batch_size(batch, count_examples)
        size = size if drawn is None else min(size, next(drawn, size))
        if size:
            yield batch, size


def _makes_new_batches(loader: Iterable[Any]) -> bool:
    """Return whether a batch certainly stays unchanged while later batches are read."""
    if isinstance(loader, (list, tuple)):
        return True
    # A collate function of the user may write into the same tensors each time; worker processes send copies.
    fresh = getattr(loader, "collate_fn", None) is default_collate
    by_torch = getattr(loader, "batch_sampler", None) is not None
    return by_torch and (fresh or bool(getattr(loader, "num_workers", 0)))


@dataclass(frozen=True)
class ExampleCounter:
    """Counts the examples of a batch that affect the loss: those with targets that the loss does not ignore.

    The mean loss is taken over the examples that count. With one class per example, ignored examples do not count.
    With several targets per example, such as tokens, all examples count, unless every target of the batch is
    ignored: the mean loss is then undefined.

    Parameters
    ----------
    count_examples : callable, optional
        ``count_examples(inputs, targets)``; if given, its result counts, whatever the targets. See `batch_size`.
    ignored : int
        Class that the loss ignores.

    Examples
    --------
    >>> classes, tokens = torch.tensor([1, IGNORED, 0, IGNORED]), torch.full((4, 3), IGNORED)
    >>> [ExampleCounter().counting((torch.zeros(4, 3), each), 4) for each in (classes, tokens)]
    [2, 0]
    """

    count_examples: CountExamples | None = None
    ignored: int = IGNORED

    def all_of(self, batch: Any) -> int:
        """Return the number of examples in a batch, whether they count or not."""
        return batch_size(batch, self.count_examples)

    def counting(self, batch: Any, size: int) -> int:
        """Return how many of a batch's ``size`` examples count."""
        if not size or self.count_examples is not None:
            return size
        targets = as_pair(batch)[1]
        if isinstance(targets, Tensor) and targets.shape == (size,) and targets.dtype in _CLASSES:
            return int((~is_ignored(targets, self.ignored)).sum())
        return 0 if all_ignored(targets, self.ignored) else size

    def over(self, loader: Iterable[Any]) -> Iterator[tuple[Any, int, int]]:
        """Yield the batches of a loader, each with the numbers of examples that count and of all examples."""
        for batch, size in counted(loader, self.count_examples):
            yield batch, self.counting(batch, size), size


def drawn_examples(loader: Iterable[Any], batches: int) -> int | None:
    """Return the number of examples that a DataLoader draws in ``batches`` batches; None if not known."""
    drawn = getattr(loader, "batch_sampler", None)
    if drawn is None:
        # Without automatic batching the dataset yields whole batches of unknown size.
        return None
    if type(drawn) is not BatchSampler and isinstance(drawn, Sequence):
        return sum(len(batch) for batch in drawn)
    sampler = getattr(drawn, "sampler", None)
    size = getattr(drawn, "batch_size", None)
    if isinstance(sampler, Sized):
        known = length_of(sampler)
    else:
        dataset = getattr(loader, "dataset", None)
        known = length_of(dataset) if isinstance(dataset, Sized) else None
    if known is None or not isinstance(size, int):
        return None
    return min(known, batches * size)


def length_of(loader: Any) -> int | None:
    """Return the length of a loader or dataset, or None; a stream may have a ``__len__`` that raises an error."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except (TypeError, NotImplementedError):
        return None


def _drawn_sizes(loader: Iterable[Any]) -> Iterator[int] | None:
    """Return the number of examples that a DataLoader draws for each batch; None if not known."""
    drawn = getattr(loader, "batch_sampler", None)
    if drawn is not None and type(drawn) is not BatchSampler:
        # Only torch's own sampler always yields the smallest batch last: one that sorts by length may yield it
        # first.
        return (len(batch) for batch in drawn) if isinstance(drawn, Sequence) else None
    size = getattr(drawn, "batch_size", None)
    batches = length_of(loader)
    if not isinstance(size, int) or batches is None:
        return None
    if not isinstance(getattr(drawn, "sampler", None), Sized):
        # An iterable dataset: each worker process ends with a smaller batch of its own.
        return None
    examples = drawn_examples(loader, batches)
    if examples is None:
        return None
    return (min(size, examples - start) for start in range(0, examples, size))


def lengths_in(value: Any) -> Iterator[int]:
    """Yield the first length of each tensor inside a value, and the sizes of packed sequences and graphs."""
    if isinstance(value, PackedSequence):
        yield int(value.batch_sizes[0]) if len(value.batch_sizes) else 0
    elif isinstance(value, Tensor):
        if value.dim():
            yield value.size(0)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from lengths_in(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from lengths_in(each)
    else:
        said = (getattr(value, name, None) for name in _GRAPHS)
        yield from [each for each in said if isinstance(each, int) and not isinstance(each, bool)][
            :1
        ]


def _second_lengths(inputs: Any, axes: int = 2) -> set[int]:
    """Return the lengths of the second axes of tensors of so many axes, where examples are if time comes first."""
    if isinstance(inputs, Tensor):
        return {inputs.size(1)} if inputs.dim() >= axes and not inputs.is_nested else set()
    if isinstance(inputs, PackedSequence):
        return set()
    entries = inputs.values() if isinstance(inputs, Mapping) else inputs
    if not isinstance(inputs, (Mapping, tuple, list)):
        return set()
    return set().union(*(_second_lengths(entry, axes) for entry in entries))


def all_ignored(targets: Any, ignored: int = IGNORED) -> bool:
    """Return whether all targets are the class that the loss ignores."""
    if not isinstance(targets, Tensor) or targets.is_nested or targets.dtype not in _CLASSES:
        return False
    # For nearly every batch the first target already shows that not all are ignored.
    if not targets.numel() or int(targets[(0,) * targets.ndim]) != ignored:
        return False
    return bool(is_ignored(targets, ignored).all())


def is_ignored(targets: Tensor, ignored: int) -> Tensor:
    """Return which targets are the class that the loss ignores.

    Targets are compared as int64, as in losses: as bytes, -100 would equal class 156.

    >>> is_ignored(torch.tensor([156, 255], dtype=torch.uint8), -100).tolist()
    [False, False]
    """
    return targets.long() == ignored


def _is_listed(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and not isinstance(value, PackedSequence)


def _of_one_kind(entries: Sequence[Any]) -> bool:
    """Return whether entries may be examples; a pair of signals and lengths, for instance, are not."""
    kinds = {
        (entry.dtype, entry.dim()) if isinstance(entry, Tensor) else type(entry)
        for entry in entries
    }
    return len(kinds) == 1


def _of_all_examples(entries: Sequence[Any]) -> bool:
    """Return whether each entry has a row per example, as for a model with several inputs and outputs."""
    lengths = {len(entry) if isinstance(entry, Tensor) and entry.dim() else -1 for entry in entries}
    return len(lengths) == 1 and -1 not in lengths


def _checked(count: Any) -> int:
    try:
        whole = int(count)
    except (TypeError, ValueError, OverflowError):
        whole = -1
    if whole < 0 or whole != count:
        raise TrainingError(
            f"count_examples returned {count!r}: it must return how many examples a batch has, a whole number"
        )
    return whole
