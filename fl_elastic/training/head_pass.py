"""One pass over a client's data for the sums that determine the best linear head; nothing is trained."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from fl_elastic.closed_form.folds import FOLDS
from fl_elastic.closed_form.head_sums import HeadSums
from fl_elastic.errors import ModelError, TrainingError
from fl_elastic.groups import Batch
from fl_elastic.groups.batch import IGNORED, as_pair, counted
from fl_elastic.groups.batch_rows import few_of
from fl_elastic.groups.forward import LossFn, call_model, refusing_misfits, to_device
from fl_elastic.groups.loss_settings import ignored_class, weighs_classes
from fl_elastic.groups.sample_ids import sample_ids
from fl_elastic.ops.inference import as_inference
from fl_elastic.profiling.profile import model_device
from fl_elastic.training.evaluate import evaluating
from fl_elastic.training.gathered_sums import NONE_COUNTS, GatheredSums
from fl_elastic.training.last_layer import (
    LayerRows,
    calls_of,
    is_linear,
    rows_of,
)
from fl_elastic.training.loader import within
from fl_elastic.training.loss_of_scores import log_odds, takes_log_odds

_LOG = logging.getLogger("fl_elastic")
_LayOut: TypeAlias = Callable[[Any], Any]


def head_sums(
    model: nn.Module,
    loader: Iterable[Batch],
    *,
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
        (N, T, C), or of a 1 x 1 convolution, (N, C, H, W): then each token or position is an example. The
        output may be in another shape, as after ``squeeze``, or that of one token for each example.
    loader : iterable of batches
        Targets are classes, of the output's shape without C, where -100 or the loss's ``ignore_index`` is ignored,
        or numbers of the output's shape; several labels per example are given as numbers 0 and 1.
    running : callable, optional
        Returns the context in which the model runs on a batch; if left out, it runs as it is.
    together : int
        Least number of inputs per fold, approximately; if the inputs do not suffice for five folds, there are
        fewer.
    loss_fn : callable, optional
        The loss that the head is for. If it interprets outputs as log-odds of targets from 0 to 1, as the binary
        cross-entropy with logits does, the sums are of log-odds (`fl_elastic.training.loss_of_scores.log_odds`). A
        loss is refused if it interprets outputs as something other than scores, such as probabilities, or compares
        them with other classes, such as those of the next token.

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
        model, loader, seconds=math.inf, running=running, together=together, loss_fn=loss_fn
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
    """Return the sums of `head_sums`, and the number of inputs in them; None if the whole loader was read.

    No batch is begun after ``seconds``; the sums then cover a part of the data.
    """
    gathered, inputs = GatheredSums(), 0

    def take(rows: LayerRows, keys: list[int]) -> None:
        nonlocal inputs
        inputs += len(keys)
        gathered.add(rows, keys)

    ended = _pass_over(model, loader, seconds, running, loss_fn, take)
    return gathered.sums(model, together), None if ended else inputs


def sums_apart(
    model: nn.Module,
    loader: Iterable[Batch],
    *,
    seconds: float = math.inf,
    loss_fn: LossFn | None = None,
    clip: float | None = None,
) -> tuple[HeadSums, HeadSums]:
    """Return the sums over all examples and over about a fifth of them, for protocols that can only add sums up.

    Whether an example belongs to the fifth depends on that example alone, so that it never affects the sums of
    others.

    Parameters
    ----------
    model, loader, seconds, loss_fn
        See `sums_and_inputs`.
    clip : float, optional
        Features are divided by this length, after longer features of an example are scaled down to it. A repeated
        example is not counted again.

    Raises
    ------
    TrainingError
        As `head_sums` does, and with a clip if an input has several rows, because each row would be clipped
        separately, or if the loader draws with replacement.
    """
    gathered = GatheredSums(), GatheredSums()
    seen: set[tuple[int, int]] = set()
    if clip is not None and getattr(getattr(loader, "sampler", None), "replacement", False):
        # With random augmentation, a repeated example is not recognised.
        raise TrainingError(
            "differential privacy for sums requires that each example counts once, and the loader draws examples "
            "with replacement: give a loader that draws each once"
        )

    def take(rows: LayerRows, keys: list[int]) -> None:
        rows = rows if clip is None else _once(_clipped(rows, clip), keys, seen)
        apart = torch.tensor([key % FOLDS == 0 for key in keys], dtype=torch.bool)[rows.inputs]
        for some, each in zip((apart, ~apart), gathered, strict=True):
            each.add(rows.where(some), keys)

    _pass_over(model, loader, seconds, None, loss_fn, take)
    held, rest = (each.sums(model, 1, empty=True).without_folds() for each in gathered)
    if not held.num_examples + rest.num_examples:
        raise TrainingError(NONE_COUNTS)
    return held + rest, held


def _clipped(rows: LayerRows, clip: float) -> LayerRows:
    """Return rows whose features are divided by ``clip`` and have at most length 1."""
    if rows.several or not rows.classes:
        raise TrainingError(
            "differential privacy for sums needs one class for each input: with classes of tokens or places, or "
            "with numbers, what one input adds to the sums is not bounded"
        )
    features = rows.features.cpu().double()
    return replace(rows, features=features / features.norm(dim=1, keepdim=True).clamp(min=clip))


def _once(rows: LayerRows, keys: list[int], seen: set[tuple[int, int]]) -> LayerRows:
    """Return the rows of inputs that were not seen before with the same class, and add them to ``seen``."""
    known = len(seen)
    new = []
    for place, target in zip(rows.inputs.tolist(), rows.wanted.argmax(dim=1).tolist(), strict=True):
        seen.add((keys[place], target))
        new.append(len(seen) > known)
        known = len(seen)
    return rows.where(torch.tensor(new, dtype=torch.bool))


def _pass_over(
    model: nn.Module,
    loader: Iterable[Batch],
    seconds: float,
    running: Callable[[Batch], AbstractContextManager[None]] | None,
    loss_fn: LossFn | None,
    take: Callable[[LayerRows, list[int]], None],
) -> bool:
    """Pass each batch to ``take`` as rows of the last layer, with a key per input; leave the model as it was.

    Return whether the loader was read to its end.
    """
    ended = False

    def to_the_end() -> Iterator[tuple[Batch, int]]:
        nonlocal ended
        yield from counted(loader)
        ended = True

    odds: bool | None = None
    # Whether it is settled that the loss does not take outputs for log-odds: targets from 0 to 1 alone do not tell.
    settled = False
    ignored = IGNORED if loss_fn is None else ignored_class(loss_fn)
    if loss_fn is not None and weighs_classes(loss_fn):
        _LOG.warning(
            "the loss weights its classes, which a head in closed form does not: it counts all examples alike"
        )
    with evaluating(model), ExitStack() as stack:
        seen = stack.enter_context(calls_of(filter(is_linear, model.modules())))
        lay_out: _LayOut | None = None
        for given, size in within(to_the_end(), seconds):
            seen.clear()
            batch = to_device(as_pair(given), model_device(model))
            inputs, targets = as_pair(batch)
            if running is None and lay_out is None:
                small = few_of((inputs, targets))
                lay_out = stack.enter_context(as_inference(model, small))
            outputs = _outputs(model, batch, size, running, lay_out)
            rows = rows_of(model, seen, outputs, targets, ignored)
            counts = len(rows.without_ignored().wanted) > 0
            if counts and (odds is None or not (odds or settled or rows.may_be_shares)):
                again = partial(_outputs, model, batch, size, running, lay_out, rows)
                odds = loss_fn is not None and takes_log_odds(
                    rows, loss_fn, outputs, targets, again
                )
                settled = (
                    loss_fn is None or rows.classes or (rows.differ and not rows.may_be_shares)
                )
            if odds and not rows.may_be_shares:
                raise TrainingError(
                    "the loss interprets the first batch's targets, which lie from 0 to 1, as shares, but another "
                    "batch has targets outside: shuffle the data, or train the head"
                )
            rows = replace(rows, wanted=log_odds(rows.wanted)) if odds else rows
            take(rows.without_ignored(), example_keys(inputs, rows.count, rows.features))
    return ended


def example_keys(inputs: Any, count: int, features: Tensor) -> list[int]:
    """Return a key for each input, equal for equal inputs; computed from features if inputs do not have rows."""
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
    rows: LayerRows | None = None,
    scores: Tensor | None = None,
) -> Any:
    """Return the model's output for a batch, with ``scores`` in these rows of the last layer's output if given."""
    hook = None
    if rows is not None and scores is not None:
        hook = rows.layer.register_forward_hook(lambda _, __, out: rows.replaced(scores, out))
    try:
        with refusing_misfits(batch), nullcontext() if running is None else running(batch):
            inputs = as_pair(batch)[0]
            return call_model(model, inputs if lay_out is None else lay_out(inputs), size)
    finally:
        if hook is not None:
            hook.remove()
