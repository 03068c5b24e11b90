"""Loss functions: the model's own, and classification by class scores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

from torch import Tensor
from torch.nn.functional import cross_entropy

from fl_elastic.errors import ModelError

_AUXILIARY_WEIGHT = 0.3


def classification_loss(outputs: Any, targets: Tensor) -> Tensor:
    """Return the cross-entropy; auxiliary outputs have weight 0.3 each, as in GoogLeNet.

    Parameters
    ----------
    outputs : Tensor, or tuple, list or dict of Tensors
        Class scores, shape (batch, classes); the first output is the main one.
    targets : Tensor
        Class indices, shape (batch,).

    Examples
    --------
    >>> import torch
    >>> round(classification_loss(torch.zeros(2, 4), torch.tensor([0, 1])).item(), 4)
    1.3863
    """
    if isinstance(outputs, Tensor):
        return cross_entropy(outputs, targets)
    scores = class_scores(outputs)
    if not scores:
        raise ModelError(f"outputs of type {type(outputs).__name__} hold no class scores")
    main, *auxiliary = [cross_entropy(score, targets) for score in scores]
    return main + _AUXILIARY_WEIGHT * sum(auxiliary)


def class_scores(outputs: Any) -> list[Tensor]:
    """Return the class scores, shape (batch, classes), in outputs of any kind, main scores first.

    Tensors whose shape differs from that of the main scores, such as features that a model also returns, are left
    out.

    Examples
    --------
    >>> import torch
    >>> [len(each) for each in class_scores({"main": torch.zeros(2, 4), "features": torch.zeros(2, 16)})]
    [2]
    """
    values = outputs.values() if isinstance(outputs, Mapping) else outputs
    several = isinstance(values, Iterable) and not isinstance(values, Tensor)
    found = values if several else [getattr(outputs, "logits", outputs)]
    tables = [value for value in found if isinstance(value, Tensor) and value.ndim == 2]
    return [value for value in tables if value.shape == tables[0].shape]


def own_loss(outputs: Any, targets: Any) -> Tensor:
    """Return the loss that a model has computed itself from labels among its inputs, as transformers' models do.

    Parameters
    ----------
    outputs : mapping or object
        Outputs with an entry or attribute ``loss``.
    targets
        Not used, because the model has them among its inputs.

    Raises
    ------
    ModelError
        If the outputs hold no loss.
    """
    del targets
    found = _loss_in(outputs)
    if found is None:
        raise ModelError(
            f"outputs of type {type(outputs).__name__} hold no loss: give batches as dicts with 'labels', which "
            "the model's forward takes, or a loss_fn of your own"
        )
    return found


def own_loss_or_cross_entropy(outputs: Any, targets: Any) -> Tensor:
    """Return the loss that the model has computed itself, or else the cross-entropy of class scores.

    Examples
    --------
    >>> import torch
    >>> own_loss_or_cross_entropy({"loss": torch.tensor(2.0)}, None).item()
    2.0
    >>> round(own_loss_or_cross_entropy(torch.zeros(2, 4), torch.tensor([0, 1])).item(), 4)
    1.3863
    """
    found = _loss_in(outputs)
    return cross_entropy(outputs, targets) if found is None else found


def _loss_in(outputs: Any) -> Tensor | None:
    if isinstance(outputs, Tensor):
        return None
    found = outputs.get("loss") if isinstance(outputs, Mapping) else None
    found = getattr(outputs, "loss", None) if found is None else found
    return found if isinstance(found, Tensor) else None


def squared_outputs(outputs: Any, targets: Any) -> Tensor:
    """Return each example's sum of squared outputs, averaged over the batch; targets are not used.

    Its gradient with respect to a weight measures the importance of the weight to an example, without a label and
    also for an example that the model gets wrong (Aljundi et al., "Memory aware synapses", ECCV 2018; for
    forgetting Foster et al., "Loss-free machine unlearning", 2024).

    Parameters
    ----------
    outputs : Tensor, mapping, tuple, list or object
        Shape (batch, ...); for other outputs their ``logits``, or the first floating tensor in them.
    targets
        Not used.

    Raises
    ------
    ModelError
        If there is no such tensor.

    Examples
    --------
    >>> import torch
    >>> squared_outputs(torch.tensor([[1.0, 2.0], [3.0, 0.0]]), None).item()
    7.0
    """
    del targets
    found = outputs.get("logits") if isinstance(outputs, Mapping) else None
    found = getattr(outputs, "logits", outputs) if found is None else found
    if not isinstance(found, Tensor):
        entries = found.values() if isinstance(found, Mapping) else found
        tensors = entries if isinstance(entries, Iterable) else ()
        found = next((tensor for tensor in tensors if _is_of_floats(tensor)), None)
    if not _is_of_floats(found):
        raise ModelError(f"outputs of type {type(outputs).__name__} hold no tensor of floats")
    return found.square().sum() / len(found)


def _is_of_floats(found: Any) -> TypeGuard[Tensor]:
    return isinstance(found, Tensor) and found.is_floating_point() and found.ndim > 0
