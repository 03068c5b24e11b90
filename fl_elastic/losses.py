"""The loss of classification models that may have several outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy

from fl_elastic.errors import ModelError

__all__ = ["classification_loss"]

_AUXILIARY_WEIGHT = 0.3


def classification_loss(outputs: Any, targets: Tensor) -> Tensor:
    """Return the cross-entropy; auxiliary outputs count 0.3 each, as GoogLeNet's authors weigh them.

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
    values = outputs.values() if isinstance(outputs, Mapping) else outputs
    scores = [value for value in values if isinstance(value, Tensor) and value.ndim == 2]
    if not scores:
        raise ModelError(f"outputs of type {type(outputs).__name__} hold no class scores")
    main, *auxiliary = [cross_entropy(score, targets) for score in scores]
    return main + _AUXILIARY_WEIGHT * sum(auxiliary)
