"""One pass over a client's data for the sums that determine the best linear head; nothing is trained."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_elastic.errors import ModelError, TrainingError
from fl_elastic.groups import Batch
from fl_elastic.groups.batch import IGNORED, as_pair, counted
from fl_elastic.groups.examples import few_of
from fl_elastic.groups.forward import (
    LossFn,
    call_model,
    ignored_class,
    refusing_misfits,
    split_batch,
    to_device,
    weighs_classes,
)
from fl_elastic.groups.held_state import Attributes
from fl_elastic.groups.model_state import ModelState
from fl_elastic.groups.sample_ids import sample_ids
from fl_elastic.ops.inference import as_inference
from fl_elastic.profiling.profile import model_device
from fl_elastic.training.batches import NO_BATCH, within
from fl_elastic.training.last_layer import (
    LastLayer,
    Rows,
    calls_of,
    is_linear,
    log_odds,
    rows_of,
    shaped_like,
    takes_log_odds,
)
from fl_elastic.update.closed_form import ClosedFormHead, closed_form_head
from fl_elastic.update.folds import Fold
from fl_elastic.update.head_sums import HeadSums

NONE_COUNTS = "no target counts: every class is one that is ignored"
"""Error message for data without a target that counts."""
_LOG = logging.getLogger("fl_elastic")
_AT_ONCE = 256
_MOST_AT_ONCE = 4096
_FOLDS = 5
# Bytes of a header, at most.
_FRAME = 512
# Held out are this many examples, or half the number of features if that is more: their rows are no more numbers
# than the products of all features.
_HELD_OUT = 320
# Peak of bytes while sums are made and written: for each feature of a held-out example, and for each product of two
# features if products are added up. Measured with 200 to 3,000 examples of 700 to 2,048 features.
_BYTES_OF_A_ROW, _BYTES_OF_A_PRODUCT = 40, 52
# If inputs have many rows each, at least this many inputs are held out, each with the rows that give the same sums.
_INPUTS = 20


def head_sums(
    model: nn.Module,
    loader: Iterable[Batch],
    *,
    seconds: float = float("inf"),
    running: Callable[[Batch], AbstractContextManager[None]] | None = None,
    together: int = 1,
    loss_fn: LossFn | None = None,
) -> HeadSums:
    """Return the sums over a loader of the last linear layer's inputs and of the targets.

    The model runs in eval mode without gradients; modes are restored. Up to five folds of the examples are summed
    separately, to be held out in turn: equal inputs fall into the same fold, and every pass holds out the same
    examples.

    Parameters
    ----------
    model : nn.Module
        Its output, or the ``logits`` in it as transformers give them, is that of a linear layer, of shape (N, C) or
        (N, T, C), or of a 1 x 1 convolution, (N, C, H, W): then each token or position is an example.
    loader : iterable of batches
        Targets are classes, of the output's shape without C, where -100 or the loss's ``ignore_index`` is ignored,
        or numbers of the output's shape; several labels per example are given as numbers 0 and 1.
    seconds : float
        No batch is begun after this many seconds; the sums then cover a part of the data.
    running : callable, optional
        Returns the context in which the model runs on a batch; if left out, it runs as it is.
    together : int
        Least number of inputs per fold, approximately; if the inputs do not suffice for five folds, there are
        fewer.
    loss_fn : callable, optional
        The loss that the head is for. If it takes numbers from 0 to 1 for log-odds, as the binary cross-entropy
        does, the sums are of log-odds (`fl_elastic.training.last_layer.log_odds`). Classes of tokens or positions
        are refused if the loss does not compare them with the scores at the same position.

    Raises
    ------
    TrainingError
        If the model does not end in a linear layer, targets do not fit it, or data are missing or not finite.

    Examples
    --------
    >>> found = head_sums(nn.Linear(2, 3), [(torch.arange(8.0).reshape(4, 2), torch.tensor([0, 1, 1, 2]))])
    >>> found.weight, found.num_examples, found.targets[-1].tolist()
    ('weight', 4, [1.0, 2.0, 1.0])
    """
    return sums_and_inputs(
        model, loader, seconds=seconds, running=running, together=together, loss_fn=loss_fn
    )[0]


def sums_and_inputs(
    model: nn.Module,
    loader: Iterable[Batch],
    *,
    seconds: float,
    running: Callable[[Batch], AbstractContextManager[None]] | None = None,
    together: int = 1,
    loss_fn: LossFn | None = None,
) -> tuple[HeadSums, int | None]:
    """Return what `head_sums` does, and the number of inputs in the sums; None if these are all of the loader's."""
    gathered, inputs = _Gathered(), 0

    def take(rows: Rows, keys: list[int]) -> None:
        nonlocal inputs
        inputs += len(keys)
        gathered.add(rows, keys)

    ended = _pass_over(model, loader, seconds, running, loss_fn, take)
    return gathered.sums(model, together), None if ended else inputs


def sums_apart(
    model: nn.Module,
    loader: Iterable[Batch],
    *,
    seconds: float = float("inf"),
    loss_fn: LossFn | None = None,
    clip: float | None = None,
) -> tuple[HeadSums, HeadSums]:
    """Return the sums over all examples and over about a fifth of them, for protocols in which sums only add up.

    Whether an example belongs to the fifth depends on that example alone, so that it never affects the sums of
    others.

    Parameters
    ----------
    model, loader, seconds, loss_fn
        See `head_sums`.
    clip : float, optional
        Features are divided by this length, and an example's features that are longer are scaled down to it.

    Raises
    ------
    TrainingError
        As `head_sums` does, and if an input has several rows, because each row would be clipped separately.
    """
    gathered = _Gathered(), _Gathered()

    def take(rows: Rows, keys: list[int]) -> None:
        rows = rows if clip is None else _clipped(rows, clip)
        apart = torch.tensor([key % _FOLDS == 0 for key in keys], dtype=torch.bool)[rows.inputs]
        for some, each in zip((apart, ~apart), gathered, strict=True):
            each.add(rows.where(some), keys)

    _pass_over(model, loader, seconds, None, loss_fn, take)
    held, rest = (each.sums(model, 1, empty=True).without_folds() for each in gathered)
    if not held.num_examples + rest.num_examples:
        raise TrainingError(NONE_COUNTS)
    return held + rest, held


def _clipped(rows: Rows, clip: float) -> Rows:
    """Return rows whose features are divided by ``clip`` and have at most length 1."""
    if rows.several or not rows.classes:
        raise TrainingError(
            "differential privacy for sums is of one class for each input: what one input adds to the sums of "
            "tokens, of places or of numbers has no known length"
        )
    features = rows.features.cpu().double()
    return replace(rows, features=features / features.norm(dim=1, keepdim=True).clamp(min=clip))


def _pass_over(
    model: nn.Module,
    loader: Iterable[Batch],
    seconds: float,
    running: Callable[[Batch], AbstractContextManager[None]] | None,
    loss_fn: LossFn | None,
    take: Callable[[Rows, list[int]], None],
) -> bool:
    """Pass each batch to ``take`` as rows of the last layer, with a key per input; leave the model as it was.

    Return whether the loader was read to its end.
    """
    ended = False

    def to_the_end() -> Iterator[tuple[Batch, int]]:
        nonlocal ended
        yield from counted(loader)
        ended = True

    modes = [(module, module.training) for module in model.modules()]
    held = Attributes.of(model)
    odds: bool | None = None
    # Whether a batch beyond shares has shown what the loss takes outputs for.
    settled = False
    ignored = IGNORED if loss_fn is None else ignored_class(loss_fn)
    if loss_fn is not None and weighs_classes(loss_fn):
        _LOG.warning(
            "the loss weights its classes, which a head in closed form does not: it counts all examples alike"
        )
    model.eval()
    try:
        with torch.no_grad(), ExitStack() as stack:
            seen = stack.enter_context(calls_of(filter(is_linear, model.modules())))
            lay_out: _LayOut | None = None
            for given, size in within(to_the_end(), seconds):
                seen.clear()
                batch = to_device(as_pair(given), model_device(model))
                if not size:
                    continue
                inputs, targets = split_batch(batch)
                if running is None and lay_out is None:
                    small = few_of((inputs, targets))
                    lay_out = stack.enter_context(as_inference(model, small))
                outputs = _outputs(model, batch, size, running, lay_out)
                rows = rows_of(model, seen, outputs, targets, ignored)
                if odds is None or not (odds or settled or rows.may_be_shares):
                    again = partial(_outputs, model, batch, size, running, lay_out, rows.layer)
                    odds = loss_fn is not None and takes_log_odds(rows, loss_fn, targets, again)
                    settled = (
                        loss_fn is None or rows.classes or (rows.differ and not rows.may_be_shares)
                    )
                if odds and not rows.may_be_shares:
                    raise TrainingError(
                        "the loss takes the first batch's targets, which lie from 0 to 1, for shares, and other "
                        "targets do not: shuffle the data, or train the head"
                    )
                rows = replace(rows, wanted=log_odds(rows.wanted)) if odds else rows
                take(rows.without_ignored(), example_keys(inputs, rows.count, rows.features))
    finally:
        held.put_back()
        for module, mode in modes:
            module.training = mode
    return ended


def solve_head(
    model: nn.Module,
    loader: Iterable[Batch],
    running: Callable[[Batch], AbstractContextManager[None]] | None = None,
    loss_fn: LossFn | None = None,
) -> tuple[ClosedFormHead, str]:
    """Solve for the head in closed form and write it into the model; return it and the name of its weight.

    Parameters
    ----------
    model, loader, running, loss_fn
        See `head_sums`.

    Raises
    ------
    TrainingError
        If the model does not end in a linear layer, targets do not fit it, or data are missing or not finite.

    Examples
    --------
    >>> model = nn.Linear(1, 2)
    >>> data = [(torch.tensor([[0.0], [1.0], [2.0], [3.0]]), torch.tensor([0, 0, 1, 1]))]
    >>> solve_head(model, data)[1], model(torch.tensor([[0.0], [3.0]])).argmax(1).tolist()
    ('weight', [0, 1])
    """
    sums = head_sums(model, loader, running=running, loss_fn=loss_fn)
    head = closed_form_head(sums, intercept=_layer_of(model, sums.weight).bias is not None)
    put_head(model, head, sums.weight)
    return head, sums.weight


def held_out(features: int) -> int:
    """Return the largest number of examples that is held out for this many features."""
    return max(_HELD_OUT, features // 2)


def sums_bytes(features: int, outputs: int, examples: int) -> int:
    """Return how many bytes a client's sums take on the wire.

    Held-out examples travel as rows, at most as many per fold as there are features; the others as products.
    """
    held = min(examples, held_out(features))
    numbers = min(held, _FOLDS * features) * (features + outputs)
    if examples > held:
        numbers += features * (features + 1) // 2 + features * outputs
    return _FRAME + 4 * numbers + 8 * (_FOLDS + 1) * (features + 2 * outputs)


def features_in_memory(memory: float, examples: int) -> int:
    """Return the number of features up to which the sums over these examples fit into this many bytes.

    >>> features_in_memory(1e8, 300), features_in_memory(1e8, 1000)
    (8333, 1386)
    """
    most = int((memory / _BYTES_OF_A_PRODUCT) ** 0.5)
    # With more features all examples are held out, and no products are added up.
    if examples <= _HELD_OUT or most >= 2 * examples - 1:
        return int(memory / (_BYTES_OF_A_ROW * examples))
    return most


def refuse_frozen_head(weight: str, names: Collection[str]) -> None:
    """Raise TrainingError unless the head's weight is one of the tensors that travel."""
    if weight not in names:
        raise TrainingError(
            f"the head {weight!r} belongs to the model's frozen base, so no server can solve for it: set its "
            "requires_grad, or give the server RoundConfig(read='none')"
        )


def put_head(model: nn.Module, head: ClosedFormHead, weight: str) -> None:
    """Write a head into the linear layer whose weight has this name."""
    layer = _layer_of(model, weight)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(head.weight).reshape(layer.weight.shape))
        if layer.bias is not None:
            layer.bias.copy_(torch.from_numpy(head.bias))


def _layer_of(model: nn.Module, weight: str) -> LastLayer:
    layer = model.get_submodule(ModelState.of(model).parameter_of(weight).rpartition(".")[0])
    assert isinstance(layer, LastLayer)
    return layer


class _Gathered:
    """Adds up the examples that are not held out, many at a time.

    For few, writing the D x D sums takes longer than the products.
    """

    def __init__(self) -> None:
        self._kind: tuple[LastLayer, bool] | None = None
        self._waiting: list[tuple[Tensor, Tensor, Tensor]] = []
        self._sums: tuple[NDArray[np.float64], ...] | None = None
        # The features' mean in the first batch. Sums about it are not rounded by the size of a constant feature.
        self._origin = torch.zeros(0, dtype=torch.float64)
        self._held = _HeldOut()

    def add(self, rows: Rows, keys: list[int]) -> None:
        """Take in the rows of a batch, and a key per input."""
        kind = rows.layer, rows.classes
        if self._kind not in (None, kind):
            raise TrainingError(
                "a head in closed form needs one last layer and one kind of target for all batches"
            )
        self._kind = kind
        own = torch.tensor(keys, dtype=torch.int64)[rows.inputs]
        # Not every device supports double precision.
        self._waiting.append((rows.features.cpu(), rows.wanted, own))
        if sum(len(each) for each, *_ in self._waiting) >= _AT_ONCE:
            self._add_up()

    def sums(self, model: nn.Module, together: int, *, empty: bool = False) -> HeadSums:
        """Return the sums over all batches; raise TrainingError if there was none, or none with an example."""
        if self._waiting:
            self._add_up()
        if self._sums is None or self._kind is None:
            raise TrainingError(NO_BATCH)
        names = ModelState.of(model).names
        layer, classes = self._kind
        own = {id(each) for each in model.parameters()} & names.keys()
        if not all(each is None or id(each) in own for each in (layer.weight, layer.bias)):
            raise TrainingError(
                "the last layer's weight or bias is computed from other parameters, as by weight_norm: a head in "
                "closed form has nowhere to go; take the parametrisation off, or train the head"
            )
        self._move_back()
        products, targets, squares = self._sums
        folds = self._held.folds(together)
        weight = names[id(layer.weight)][0]
        found = HeadSums(weight, products, targets, squares, classes, folds)
        held = (part for fold in folds for part in (fold.rows, fold.targets))
        # A number that is not finite makes its row of the products so, the constant's column included.
        if not all(np.isfinite(each).all() for each in (products[-1], targets, squares, *held)):
            raise TrainingError(
                "what enters the last layer, or a target, is not finite: check the data for NaN, and the "
                "learning rate"
            )
        if not found.num_examples and not empty:
            raise TrainingError(NONE_COUNTS)
        return found

    def _add_up(self) -> None:
        together = (torch.cat(each) for each in zip(*self._waiting, strict=True))
        self._waiting = []
        for given, wanted, keys in zip(
            *(torch.split(each, _MOST_AT_ONCE) for each in together), strict=True
        ):
            rows = nn.functional.pad(given.double(), (0, 1), value=1.0)
            if self._sums is None:
                few, many = wanted.shape[1], rows.shape[1]
                # NumPy's zeros take no memory before they are written to.
                self._sums = np.zeros((many, many)), np.zeros((many, few)), np.zeros(few)
                self._origin = rows.mean(dim=0)
                self._origin[-1] = 0.0
            rows, wanted, squares, _ = self._held.exchange(rows, wanted, wanted**2, keys)
            if not len(rows):
                continue
            rows.addr_(rows[:, -1].clone(), self._origin, alpha=-1.0)
            products, targets, squared = map(torch.from_numpy, self._sums)
            # Added in place: with many features, one more matrix of products is as large as a model.
            products.addmm_(rows.T, rows)
            targets.addmm_(rows.T, wanted)
            squared.add_(squares.sum(dim=0))

    def _move_back(self) -> None:
        """Turn the sums about the origin into those about zero, in place, once."""
        assert self._sums is not None
        products, targets, _ = map(torch.from_numpy, self._sums)
        # Without an example beside those held out, nothing is written: the zeros take no memory.
        if float(products[-1, -1]):
            products.addr_(products[:, -1].clone(), self._origin)
            products.addr_(self._origin, products[-1].clone())
            targets.addr_(self._origin, targets[-1].clone())
        self._origin = torch.zeros_like(self._origin)


_LayOut: TypeAlias = Callable[[Any], Any]
_Kept: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]


class _HeldOut:
    """Chooses the held-out examples: those with the smallest keys.

    So they are the same in every pass and any order, and equal examples are held out together. An input that has
    more rows than features is kept as fewer rows with the same sums.
    """

    def __init__(self) -> None:
        self._kept: _Kept | None = None
        self._below: int | None = None

    def exchange(self, rows: Tensor, wanted: Tensor, squares: Tensor, keys: Tensor) -> _Kept:
        """Take in rows, whose last feature is the constant 1; return those that are not held out, or no longer."""
        new: _Kept = rows, wanted, squares, keys
        small = torch.ones_like(keys, dtype=torch.bool)
        if self._below is not None:
            small = keys < self._below
        left, new = _where(~small, new), _where(small, new)
        kept = new if self._kept is None else _together(self._kept, new)
        features = rows.shape[1] - 1
        found, counts = torch.unique(kept[-1], return_counts=True)
        for key in found[counts > features + 1].tolist():
            kept = _together(_where(kept[-1] != key, kept), _factor(_where(kept[-1] == key, kept)))
        found, counts = torch.unique(kept[-1], return_counts=True)
        fits = int((counts.cumsum(0) <= held_out(features)).sum())
        stay = max(fits, min(_INPUTS, len(found))) if counts.numel() else 0
        if stay < len(found):
            self._below = int(found[stay])
            left = _together(left, _where(kept[-1] >= self._below, kept))
            kept = _where(kept[-1] < self._below, kept)
        self._kept = kept
        return left

    def folds(self, together: int) -> tuple[Fold, ...]:
        """Return up to five folds of about equal size, fewer if they would have fewer than ``together`` inputs."""
        assert self._kept is not None
        order = self._kept[-1].argsort(stable=True)
        rows, goals, squares, keys = (each[order] for each in self._kept)
        counts = torch.unique_consecutive(keys, return_counts=True)[1]
        ends = counts.cumsum(0).tolist()
        parts = max(min(_FOLDS, len(ends) // max(together, 1)), 1)
        # A fold ends between unequal examples, as close as possible to where a fold of equal size would end.
        wished = [len(keys) * number / parts for number in range(1, parts + 1)]
        bounds = sorted(
            {0, *(min(ends, key=lambda end: abs(end - wish)) for wish in wished if ends)}
        )
        return tuple(
            Fold(rows[i:j].numpy(), goals[i:j].numpy(), squares[i:j].sum(dim=0).numpy())
            for i, j in pairwise(bounds)
        )


def _where(which: Tensor, kept: _Kept) -> _Kept:
    rows, wanted, squares, keys = kept
    return rows[which], wanted[which], squares[which], keys[which]


def _together(one: _Kept, other: _Kept) -> _Kept:
    rows, wanted, squares, keys = map(torch.cat, zip(one, other, strict=True))
    return rows, wanted, squares, keys


def _factor(kept: _Kept) -> _Kept:
    """Return the fewest rows of one input that have the same products."""
    turn, rows = torch.linalg.qr(kept[0])
    squares = torch.zeros(len(rows), kept[2].shape[1], dtype=kept[2].dtype)
    squares[0] = kept[2].sum(dim=0)
    return rows, turn.T @ kept[1], squares, kept[3][: len(rows)]


def example_keys(inputs: Any, count: int, features: Tensor) -> list[int]:
    """Return a key for each input, equal for equal inputs; made from its features if inputs are no rows."""
    try:
        found = sample_ids(inputs)
    except ModelError:
        found = []
    if len(found) != count:
        found = sample_ids(features.reshape(count, -1))
    return [first for first, _ in found]


def _outputs(
    model: nn.Module,
    batch: Batch,
    size: int | None,
    running: Callable[[Batch], AbstractContextManager[None]] | None,
    lay_out: _LayOut | None,
    layer: LastLayer | None = None,
    scores: Tensor | None = None,
) -> Any:
    """Return the model's output for a batch, with ``scores`` in place of the output of ``layer`` if given."""
    hook = None
    if layer is not None and scores is not None:
        hook = layer.register_forward_hook(lambda layer, _, out: shaped_like(layer, scores, out))
    try:
        with refusing_misfits(batch), nullcontext() if running is None else running(batch):
            inputs = split_batch(batch)[0]
            return call_model(model, inputs if lay_out is None else lay_out(inputs), size)
    finally:
        if hook is not None:
            hook.remove()
