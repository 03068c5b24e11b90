"""The user's ``requires_grad`` flags, remembered while the library freezes some parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

# Stored on the parameter itself: tensors compare by value and cannot be found again in a dictionary.
_NOTE = "_fl_elastic_trainable"


def trainable(parameter: Tensor) -> bool:
    """Return a parameter's ``requires_grad`` as set by the user of the library.

    While a plan is applied, it changes flags; manifest and groups must not depend on this.

    Examples
    --------
    >>> layer = nn.Linear(2, 2)
    >>> with flags_kept(layer.parameters()):
    ...     _ = layer.requires_grad_(False)
    ...     trainable(layer.weight)
    True
    >>> layer.weight.requires_grad
    True
    """
    return bool(getattr(parameter, _NOTE, parameter.requires_grad))


def flags_of(model: nn.Module) -> tuple[tuple[int, bool], ...]:
    """Return the identities of a model's parameters and the user's flags; equal as long as neither changes.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> before = flags_of(model)
    >>> _ = model[0].requires_grad_(False)
    >>> flags_of(model) == before
    False
    """
    return tuple((id(parameter), trainable(parameter)) for parameter in model.parameters())


def note_flags(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Remember the flags of parameters about to be frozen; return those not remembered before."""
    noted = [parameter for parameter in parameters if not hasattr(parameter, _NOTE)]
    for parameter in noted:
        setattr(parameter, _NOTE, parameter.requires_grad)
    return noted


def forget_flags(noted: Iterable[nn.Parameter]) -> None:
    """Forget remembered flags: the present flags are the user's again."""
    for parameter in noted:
        delattr(parameter, _NOTE)


@contextmanager
def flags_kept(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Allow flags to be changed inside the block; they are restored on leaving it, also by an exception."""
    before = [(parameter, parameter.requires_grad) for parameter in parameters]
    noted = note_flags(parameter for parameter, _ in before)
    try:
        yield
    finally:
        for parameter, flag in before:
            parameter.requires_grad_(flag)
        forget_flags(noted)
