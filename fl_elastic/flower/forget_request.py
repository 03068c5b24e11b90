"""A client's request to have examples forgotten, its training data without them, and the server's confirmation."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence, Sized
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset

from fl_elastic.errors import ModelError, TrainingError
from fl_elastic.given import whole
from fl_elastic.groups import Batch
from fl_elastic.groups.batch import batch_size
from fl_elastic.groups.batch_rows import count_rows, take_examples

_LOG = logging.getLogger("fl_elastic")


class ForgetRequest:
    """Examples that the global model must forget.

    Parameters
    ----------
    examples : iterable of batches, optional
        Re-iterable; None if nothing must be forgotten.
    rest : iterable of batches, optional
        The training data without these examples, if this request took them out.
    whole : iterable of batches, optional
        The training data before examples were taken out.
    ids : frozenset of int
        Numbers of the examples in ``whole``.

    Attributes
    ----------
    met : bool
        Whether the server has confirmed that its model was made to forget them.
    """

    def __init__(
        self,
        examples: Iterable[Batch] | None = None,
        *,
        rest: Iterable[Batch] | None = None,
        whole: Iterable[Batch] | None = None,
        ids: frozenset[int] = frozenset(),
    ) -> None:
        self.examples = examples
        self.rest = rest
        self.met = False
        self._whole, self._ids = whole, ids
        self._digest = ""

    @classmethod
    def of(cls, examples: Iterable[Batch] | None) -> ForgetRequest:
        """Return a request; raise TrainingError if there are no examples or they can be read only once."""
        if examples is not None and iter(examples) is examples:
            raise TrainingError(
                "the examples to be forgotten may be read in several rounds: pass a list or a DataLoader, not an "
                "iterator"
            )
        if examples is not None and next(iter(examples), None) is None:
            raise TrainingError("there is no batch to be forgotten: leave forget out")
        return cls(examples)

    def with_ids(self, loader: Iterable[Batch], ids: Iterable[int]) -> ForgetRequest:
        """Return a request that also takes these examples out of ``loader``; this request if there are no ids.

        Raises
        ------
        TrainingError
            See `parted`.
        """
        numbers, whole = numbers_of(ids), loader
        if not numbers:
            return self
        if self._whole is not None and self.rest is loader:
            whole, numbers = self._whole, self._ids | numbers
        rest, gone = parted(whole, numbers)
        return ForgetRequest(gone, rest=rest, whole=whole, ids=numbers)

    @property
    def pending(self) -> bool:
        """Whether there are examples that the server has not confirmed as forgotten."""
        return self.examples is not None and not self.met

    def digest(self, client: str) -> str:
        """Return the digest by which the server names this request of a client."""
        if not self._digest:
            from fl_elastic.methods.dampening.forget import digest_of

            # Compared with None, because the truth value of a loader calls ``len``, which may raise an error.
            self._digest = digest_of(() if self.examples is None else self.examples, client)
        return self._digest

    def confirm(self, client: str, forgotten: str) -> None:
        """Mark this request as met if ``forgotten`` is its digest.

        ``forgotten`` is the server's answer; it is empty if the server met no request.
        """
        if self.pending and forgotten == self.digest(client):
            self.met = True
            _LOG.info("the server's model was made to forget the examples of %s", forgotten)


_OTHERWISE = (
    "take the examples out of the data yourself, and give them as ElasticClient(forget=...)"
)


def parted(loader: Iterable[Batch], ids: Iterable[int]) -> tuple[Iterable[Batch], Iterable[Batch]]:
    """Return a loader of the examples that are not in ``ids``, and a loader of the examples that are.

    Parameters
    ----------
    loader : DataLoader, or list of batches
        The first of the returned loaders draws as this one does.
    ids : iterable of int
        Numbers of examples in the data set of a DataLoader; counted from 0 through the batches of a list.

    Raises
    ------
    TrainingError
        If an id belongs to no example, no example would be left, or the loader does not tell which examples it
        reads.

    Examples
    --------
    >>> import torch
    >>> batches = [(torch.tensor([[0.0], [1.0]]), torch.tensor([0, 1])), (torch.tensor([[2.0]]), torch.tensor([0]))]
    >>> rest, gone = parted(batches, [1])
    >>> [x.tolist() for x, _ in rest], [x.tolist() for x, _ in gone]
    ([[[0.0]], [[2.0]]], [[[1.0]]])
    """
    if isinstance(loader, (list, tuple)):
        sizes = [_rows(batch) for batch in loader]
        wanted = _checked(ids, sum(sizes))
        rest: list[Batch] = []
        gone: list[Batch] = []
        start = 0
        for batch, size in zip(loader, sizes, strict=True):
            numbers = range(start, start + size)
            for part, inside in ((rest, False), (gone, True)):
                rows = [number - start for number in numbers if (number in wanted) is inside]
                if rows:
                    part.append(batch if len(rows) == size else take_examples(batch, rows))
            start += size
        return rest, gone
    dataset = _numbered(loader)
    wanted = _checked(ids, len(dataset))
    kept = [number for number in range(len(dataset)) if number not in wanted]
    assert isinstance(loader, DataLoader)
    shuffles = isinstance(loader.sampler, RandomSampler)
    return (
        _over(loader, dataset, kept, shuffle=shuffles, drop_last=loader.drop_last),
        _over(loader, dataset, sorted(wanted), shuffle=False, drop_last=False),
    )


def numbers_of(ids: Iterable[int]) -> frozenset[int]:
    """Return the numbers of examples as plain integers; they may be integers of numpy, or tensors.

    Raises
    ------
    TrainingError
        If ``ids`` is not a list, or holds anything but integers.

    Examples
    --------
    >>> import torch
    >>> sorted(numbers_of(torch.tensor([3, 1, 3])))
    [1, 3]
    """
    if isinstance(ids, str) or not isinstance(ids, Iterable):
        raise TrainingError(f"ids {ids!r} are not a list: give [{ids!r}]")
    return frozenset(map(_integer, ids))


def _integer(number: Any) -> int:
    found = whole(number)
    if found is None:
        raise TrainingError(f"{number!r} is no example of these data: give numbers from 0")
    return found


def _checked(ids: Iterable[int], count: int) -> frozenset[int]:
    wanted = numbers_of(ids)
    for each in wanted:
        if not 0 <= each < count:
            raise TrainingError(
                f"{each!r} is no example of these data: give numbers from 0 to {count - 1}"
            )
    if len(wanted) == count:
        raise TrainingError(
            "no example would be left: a client without data leaves the fleet instead"
        )
    return wanted


def _rows(batch: Batch) -> int:
    size = batch_size(batch)
    try:
        fits = not size or count_rows(batch) == size
    except ModelError:
        fits = False
    if not fits:
        raise TrainingError(
            f"the first dimension of these batches is not that of examples: {_OTHERWISE}"
        )
    return size


def _numbered(loader: Iterable[Batch]) -> Any:
    """Return the dataset of a DataLoader that draws each example once; raise TrainingError for any other."""
    plain = type(loader) is DataLoader and loader.batch_size is not None
    dataset = getattr(loader, "dataset", None)
    if not plain or isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        raise TrainingError(
            f"{type(loader).__name__} does not say which examples it reads: {_OTHERWISE}"
        )
    sampler: Any = getattr(loader, "sampler", None)
    random = type(sampler) is RandomSampler and not sampler.replacement
    once = type(sampler) is SequentialSampler or (random and sampler.num_samples == len(dataset))
    if not once:
        raise TrainingError(
            f"a {type(sampler).__name__} may not draw each example once: {_OTHERWISE}"
        )
    return dataset


def _over(
    loader: DataLoader[Any], dataset: Any, numbers: Sequence[int], *, shuffle: bool, drop_last: bool
) -> DataLoader[Any]:
    """Return a loader over these examples with the settings of the given loader."""
    return DataLoader(
        Subset(dataset, numbers), loader.batch_size, shuffle=shuffle, drop_last=drop_last,
        num_workers=loader.num_workers, collate_fn=loader.collate_fn, pin_memory=loader.pin_memory,
        timeout=loader.timeout, worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context, generator=loader.generator,
        prefetch_factor=loader.prefetch_factor, persistent_workers=loader.persistent_workers,
    )  # fmt: skip
