"""Evaluate a model on a loader."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fl_elastic.errors import TrainingError
from fl_elastic.groups import Batch, LossFn
from fl_elastic.groups.batch import CountExamples, as_pair, is_ignored
from fl_elastic.groups.forward import outputs_and_loss, scores_of, to_device
from fl_elastic.groups.held_state import Attributes
from fl_elastic.groups.loss_settings import example_counter, is_summed, weight_in_mean
from fl_elastic.groups.untouched import modes_kept
from fl_elastic.profiling.profile import model_device
from fl_elastic.training.loader import check_loader

MetricsFn = Callable[[Any, Any], Mapping[str, float]]
"""``metrics_fn(outputs, targets)`` returns the metrics of one batch by name.

It may also be a collection that is updated with each batch and computes the metrics of all examples together, as
``torchmetrics.MetricCollection`` does: many metrics, such as F1, are no mean over batches.
"""
_COLLECTS = ("reset", "update", "compute")


@dataclass(frozen=True)
class Evaluation:
    """Loss, accuracy and metrics of a model on a loader.

    Attributes
    ----------
    loss : float
        Mean over the examples. For torch's classification losses it is the mean over all targets that count,
        because an example may have many targets, or none.
    accuracy : float or None
        Share of correctly classified examples; None unless every batch has (N, C) class scores and (N,) class
        targets, from 0 to C - 1.
    num_examples : int
        Number of examples, without those whose class the loss ignores.
    metrics : dict
        Mean of what ``metrics_fn`` returned, by name, weighted by examples; only batches that have the name count.
        A collection with ``update`` and ``compute`` computes its metrics for all examples together.
    """

    loss: float
    accuracy: float | None
    num_examples: int
    metrics: dict[str, float] = field(default_factory=dict)


def evaluate(
    model: nn.Module,
    loss_fn: LossFn,
    loader: Iterable[Batch],
    *,
    metrics_fn: MetricsFn | None = None,
    running: Callable[[Batch], AbstractContextManager[None]] | None = None,
    count_examples: CountExamples | None = None,
) -> Evaluation:
    """Return loss, accuracy and metrics of ``model`` in eval mode; every module's mode is restored.

    Parameters
    ----------
    model : nn.Module
        On any torch device.
    loss_fn : callable
        ``loss_fn(outputs, targets)``, the mean over the batch, or the sum if its ``reduction`` is ``"sum"``.
    loader : iterable of batches
        The data.
    metrics_fn : callable, optional
        ``metrics_fn(outputs, targets)`` returns a dict of finite numbers, means over the batch; or a collection of
        metrics as in torchmetrics, of which a copy is used.
    running : callable, optional
        Returns the context in which the model runs on a batch; if left out, it runs as it is.
    count_examples : callable, optional
        ``count_examples(inputs, targets)``, see `fl_elastic.groups.batch.batch_size`.

    Raises
    ------
    TrainingError
        If the loader is empty or not a loader, a batch does not fit the model, or a metric is not finite.

    Examples
    --------
    >>> data = [(torch.zeros(4, 2), torch.zeros(4, 1))]
    >>> def error(outputs, targets):
    ...     return {"mae": float((outputs - targets).abs().mean())}
    >>> found = evaluate(nn.Linear(2, 1, bias=False), nn.functional.mse_loss, data, metrics_fn=error)
    >>> found.accuracy, found.metrics
    (None, {'mae': 0.0})
    """
    check_loader(loader)
    loss, over, examples = 0.0, 0.0, 0
    counter = example_counter(loss_fn, count_examples)
    right: int | None = 0
    judged = 0
    sums: defaultdict[str, float] = defaultdict(float)
    counts: defaultdict[str, int] = defaultdict(int)
    collected = _emptied(metrics_fn)
    with evaluating(model):
        for given, size, _ in counter.over(loader):
            if not size:
                # The mean over no examples is not defined.
                continue
            batch = to_device(as_pair(given), model_device(model))
            with nullcontext() if running is None else running(batch):
                outputs, batch_loss = outputs_and_loss(model, loss_fn, batch)
            found = _right_examples(outputs, batch[1])
            if found is not None:
                known = ~is_ignored(batch[1], counter.ignored)
                if not known.any():
                    continue
                found = found[known] if _are_outputs(batch[1][known], outputs) else None
            counting = weight_in_mean(loss_fn, batch[1], size)
            if not counting:
                continue
            over += counting
            loss += float(batch_loss) * (1 if is_summed(loss_fn) else counting)
            right = None if right is None or found is None else right + int(found.sum())
            judged += 0 if found is None else len(found)
            if collected is not None:
                collected.update(outputs, batch[1])
            elif metrics_fn is not None:
                for name, value in _numbers(metrics_fn(outputs, batch[1])).items():
                    sums[name] += value * size
                    counts[name] += size
            examples += size
    if examples == 0:
        raise TrainingError(
            "the test loader gave no batch, or none with an example: check the client's data"
        )
    return Evaluation(
        loss / over,
        None if right is None else right / judged,
        examples,
        {name: total / max(counts[name], 1) for name, total in sums.items()}
        if collected is None
        else _numbers(collected.compute()),
    )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run a model in eval mode and without gradients inside the block; modes and held states are restored.

    A recurrent model may hold a state from batch to batch: the block starts with it, and it is restored afterwards.
    """
    held = Attributes.of(model)
    with modes_kept(model), torch.no_grad():
        model.eval()
        try:
            yield
        finally:
            held.put_back()


def _right_examples(outputs: object, targets: object) -> Tensor | None:
    """Return for each example whether the class with the highest score is its target, shape (N,).

    None without class scores of shape (N, C) or class targets. The scores may be the ``logits`` of the outputs.

    Examples
    --------
    >>> _right_examples(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1])).tolist()
    [True, False]
    """
    scores = scores_of(outputs)
    if scores is None or not isinstance(targets, Tensor):
        return None
    fits = scores.ndim == 2 and targets.ndim == 1 and len(scores) == len(targets)
    if not fits or targets.is_floating_point() or targets.is_complex() or scores.shape[1] < 2:
        return None
    return scores.argmax(dim=1) == targets


def _are_outputs(classes: Tensor, outputs: object) -> bool:
    """Return whether classes are indices of the outputs; a loss may number them otherwise, such as from 1."""
    scores = scores_of(outputs)
    assert scores is not None
    return 0 <= int(classes.long().min()) <= int(classes.long().max()) < scores.shape[1]


def of_a_batch(metrics_fn: MetricsFn | None) -> Callable[[Any, Any], Any] | None:
    """Return a function of a batch's outputs and targets: ``metrics_fn``, or ``update`` of a copied collection."""
    collected = _emptied(metrics_fn)
    return metrics_fn if collected is None else collected.update


def _emptied(metrics_fn: Any) -> Any:
    """Return an empty copy of a collection of metrics, as in torchmetrics; None for a function."""
    if not all(callable(getattr(metrics_fn, name, None)) for name in _COLLECTS):
        return None
    own = copy.deepcopy(metrics_fn)
    own.reset()
    return own


def _numbers(found: Any) -> dict[str, float]:
    """Return metrics as plain numbers."""
    if not isinstance(found, Mapping):
        raise TrainingError(
            f"metrics_fn returned a {type(found).__name__}: return a dict with one number per name"
        )
    metrics: dict[str, float] = {}
    for name, value in found.items():
        try:
            metrics[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise TrainingError(
                f"metrics_fn returned {type(value).__name__} for {name!r}: return a number"
            ) from None
        if not math.isfinite(metrics[str(name)]):
            raise TrainingError(
                f"metrics_fn returned {value} for {name!r}: leave the name out where it is not defined"
            )
    return metrics
