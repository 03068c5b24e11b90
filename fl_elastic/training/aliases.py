"""Tensors that a model knows under several names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import Tensor, nn

__all__ = ["under_every_name"]


def under_every_name(model: nn.Module, counts: Counter[str]) -> Counter[str]:
    """Return the counts of first names for every name of a tied tensor, or of a layer used twice.

    Examples
    --------
    >>> layer = nn.Linear(2, 2, bias=False)
    >>> sorted(under_every_name(nn.Sequential(layer, layer), Counter({"0.weight": 3})).items())
    [('0.weight', 3), ('1.weight', 3)]
    """
    first_name = {id(tensor): name for name, tensor in _named_tensors(model, repeat=False)}
    return Counter(
        {n: counts[first_name[id(tensor)]] for n, tensor in _named_tensors(model, repeat=True)}
    )


def _named_tensors(model: nn.Module, *, repeat: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers with their names; shared ones once, or under every name."""
    yield from model.named_parameters(remove_duplicate=not repeat)
    yield from model.named_buffers(remove_duplicate=not repeat)
