"""Determine how a loss interprets a linear layer's outputs: as class scores, log-odds, or estimates of targets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from fl_elastic.errors import ModelError, TrainingError
from fl_elastic.groups.batch import as_pair
from fl_elastic.groups.forward import (
    Batch,
    LossFn,
    call_model,
    loss_of,
    one_number,
    refusing_misfits,
    scores_of,
)
from fl_elastic.groups.untouched import untouched
from fl_elastic.losses import own_loss, own_loss_or_cross_entropy
from fl_elastic.training.last_layer import LayerRows

LossOfScores: TypeAlias = Callable[[Tensor], float]
"""Loss of a batch, given scores of shape (R, C) in place of the last layer's output."""

_INSTEAD = (
    "end the model with a linear layer and give a loss of its scores, such as the cross-entropy, or train the "
    "model as it is"
)
_OF_THE_MODEL = (own_loss, own_loss_or_cross_entropy)
# Exceptions that losses raise for outputs that they do not expect.
_OF_A_LOSS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError)
# The probability that confident scores give to a class: no loss with label smoothing wants more.
_SURE = 0.9
# Factor between very large scores and the wanted ones; half precision can represent them.
_FAR = 1e4
# Relative difference of losses that is rounding.
_ROUNDED = 1e-2


def loss_of_scores(
    loss_fn: LossFn, targets: Any, outputs_with: Callable[[Tensor], Any]
) -> LossOfScores:
    """Return a batch's loss as a function of scores; it raises TrainingError if the loss cannot take scores.

    Parameters
    ----------
    loss_fn : callable
        ``loss_fn(outputs, targets)``.
    targets : any
        The batch's targets.
    outputs_with : callable
        Returns the model's outputs with given scores, shape (R, C), in place of the last layer's output.
    """

    def loss(scores: Tensor) -> float:
        outputs = outputs_with(scores)
        try:
            with _unchanged(loss_fn):
                found = loss_of(loss_fn, outputs, targets)
        except _OF_A_LOSS as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise TrainingError(
                f"the loss cannot take the scores of a linear layer ({reason}): {_INSTEAD}"
            ) from error
        return float(one_number(found))

    return loss


def refuse_other_scores(loss: LossOfScores, wanted: Tensor, classes: bool) -> None:
    """Raise TrainingError if a loss expects probabilities or their logarithms, or other classes than the targets.

    Parameters
    ----------
    loss : callable
        The loss of a batch with given scores.
    wanted : Tensor, shape (R, C)
        Wanted outputs: one-hot for classes, zeros for a class that is ignored.
    classes : bool
        Whether targets are classes.
    """
    none, some, many = (loss(times * wanted) for times in (0.0, 1.0, _FAR))
    if classes and math.isfinite(some) and not math.isfinite(loss(-wanted)):
        raise TrainingError(
            f"the loss of negative scores is not finite, as it interprets outputs as probabilities: {_INSTEAD}"
        )
    # A loss of scores is bounded below, or rises again.
    if 0 < none - some < 2 * (none - many) / _FAR:
        raise TrainingError(
            "the loss falls without bound as scores grow, as it interprets outputs as logarithms of probabilities: "
            f"{_INSTEAD}"
        )
    if classes and some > none:
        raise TrainingError(
            "the loss grows when the target class has the highest score, so it compares the outputs with another "
            "class, such as the target minus one: give targets that number the outputs from 0, or train by steps"
        )


def why_no_readout(
    model: nn.Module, functions: Iterable[Callable[[Any, Any], Any]], few: Batch
) -> str:
    """Return why a loss or metrics need more of a model's outputs than their scores; empty if they do not.

    A model whose head reads elsewhere than at the last layer outputs only scores.

    Parameters
    ----------
    model : nn.Module
        The model; it is not changed.
    functions : iterable of callable
        ``function(outputs, targets)``.
    few : batch
        A few examples.
    """
    inputs, targets = as_pair(few)
    with untouched(model), torch.no_grad(), refusing_misfits(few):
        model.eval()
        outputs = call_model(model, inputs)
    scores = scores_of(outputs)
    if scores is None or scores is outputs:
        return ""
    for function in functions:
        with torch.no_grad(), suppress(*_OF_A_LOSS), _unchanged(function):
            whole = function(outputs, targets)
            if not _is_of_scores(function, scores, targets, whole):
                return (
                    f"{_name(function)} needs more of the model's outputs, a {type(outputs).__name__}, than their "
                    "scores, but a model whose head reads elsewhere outputs only scores"
                )
    return ""


def _unchanged(function: object) -> AbstractContextManager[None]:
    """Return a context that restores the state of a loss, such as a mean of the outputs that it has seen."""
    return untouched(nn.Identity(), function)


def _is_of_scores(
    function: Callable[[Any, Any], Any], scores: Tensor, targets: Any, expected: Any
) -> bool:
    """Return whether a function accepts scores instead of the model's outputs, with the same result for a loss."""
    try:
        found = function(scores, targets)
    except (*_OF_A_LOSS, ModelError):
        return False
    if not (isinstance(found, Tensor) and isinstance(expected, Tensor)):
        return True
    return math.isclose(float(found), float(expected), rel_tol=_ROUNDED, abs_tol=_ROUNDED)


def _name(function: object) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def takes_log_odds(
    found: LayerRows,
    loss_fn: LossFn,
    outputs: Any,
    targets: Any,
    again: Callable[[Tensor], Any],
) -> bool:
    """Return whether a loss interprets scores as log-odds; raise TrainingError if no solved head suits the loss.

    Several labels 0 and 1 are usually learned with a loss of log-odds, whose best scores are not 0 and 1. No solved
    head suits a loss that compares each token with the next one's class, as a language model's does, or that
    interprets scores as something other than the targets, such as logarithms of counts. The test computes the loss
    with wanted scores in place of the layer's output.

    Parameters
    ----------
    found : LayerRows
        The rows of a batch; some of them have a target that counts.
    loss_fn : callable
        ``loss_fn(outputs, targets)``.
    outputs, targets : any
        The model's outputs for the batch, and the batch's targets.
    again : callable
        Returns the model's outputs with given scores, shape (R, C), in place of the last layer's output.
    """
    alone = isinstance(outputs, Tensor)
    if not alone and found.classes and not found.several and loss_fn in _OF_THE_MODEL:
        # The model computes its own loss of class scores, so further passes would show nothing new.
        return False
    try:
        loss_of_scores(loss_fn, targets, lambda _: outputs)(found.wanted)
    except TrainingError:
        # The loss needs outputs that the model has only in train mode, such as auxiliary scores: no test is made.
        return False
    if found.alike and isinstance(outputs, Tensor):
        again = partial(found.replaced, out=outputs)
    loss = loss_of_scores(loss_fn, targets, again)
    wanted = found.wanted.nan_to_num() if found.classes else found.wanted
    if not bool(wanted.isfinite().all()):
        # Targets that are not finite are refused when the sums are finished, with the reason.
        return False
    refuse_other_scores(loss, wanted, found.classes and not found.several)
    if found.classes:
        sure = math.log(_SURE / (1 - _SURE) * max(wanted.shape[1] - 1, 1))
        if found.several and not loss(sure * wanted) < loss(0.0 * wanted):
            raise TrainingError(
                "the loss is no smaller if the scores favour the targets, as for a model that predicts the next "
                "token: such a head cannot be solved for in closed form; train it"
            )
        return False
    before = loss(wanted)
    if found.may_be_shares:
        odds = log_odds(wanted)
        # Log-odds must not increase the loss on either half of the targets: a loss of log rates also falls if zeros
        # become negative, and most counts are zeros.
        ends = [end for end in (wanted < 0.5, wanted >= 0.5) if bool(end.any())]
        if loss(odds) < before and all(loss(odds.where(end, wanted)) <= before for end in ends):
            return True
    if found.differ and not before < loss(wanted.mean(dim=0).expand_as(wanted)):
        raise TrainingError(
            "the loss is no smaller if outputs equal their targets than if all equal the targets' mean: it "
            "interprets outputs as something else, such as the logarithm of a rate. A head in closed form would be "
            "fitted to the targets themselves; train it"
        )
    return False


def log_odds(share: Tensor) -> Tensor:
    """Return the log-odds of a share, linearised at one half.

    Examples
    --------
    >>> log_odds(torch.tensor([0.0, 0.5, 1.0])).tolist()
    [-2.0, 0.0, 2.0]
    """
    return 4.0 * share - 2.0
