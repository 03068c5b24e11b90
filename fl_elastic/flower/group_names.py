"""Valid names of a model's tensor groups, and what clients claim about them.

The server knows only the model's tensors, not its groups.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from functools import cached_property

from fl_elastic.update import Manifest
from fl_elastic.update.manifest import Role

_MOST_GROUPS, _LONGEST_TEXT = 10_000, 1 << 20
# Digits of a score, quotes and commas around it and its name.
_PER_ENTRY = 64


class GroupNames:
    """Recognises names that tensor groups of a model can have.

    A group is named after the module that holds its parameters, or after its one parameter, with ``#2`` and so on
    if several would have the same name. So there are no more groups than parameters, and each name is the beginning
    of a parameter's name.

    Parameters
    ----------
    manifest : Manifest
        Manifest of the model.

    Attributes
    ----------
    most : int
        Largest possible number of groups.

    Examples
    --------
    >>> names = "conv.weight", "head.0.bias"
    >>> known = GroupNames(Manifest(names, ((1,),) * 2, ("float32",) * 2, (Role.PARAMETER,) * 2))
    >>> [name for name in ("conv", "conv#2", "head.0", "head.0.bias", "evil", "conv#99", "con") if name in known]
    ['conv', 'conv#2', 'head.0', 'head.0.bias']
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        pairs = zip(manifest.names, manifest.roles, strict=True)
        self._parameters = [name for name, role in pairs if role is Role.PARAMETER]
        self.most = len(self._parameters)

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        found: set[str] = set()
        for name in self._parameters:
            parts = name.split(".")
            found.update(".".join(parts[:count]) for count in range(1, len(parts) + 1))
        return frozenset(found)

    @cached_property
    def longest_text(self) -> int:
        """Largest number of characters of a JSON object with one number per group."""
        # JSON may escape every character as six.
        longest = max((len(name) for name in self._parameters), default=0)
        return self.most * (6 * longest + _PER_ENTRY) + 2

    @cached_property
    def model_bytes(self) -> float:
        """Size of the parameters as fp32."""
        return 4.0 * sum(math.prod(self._manifest.shape(name)) for name in self._parameters)

    def __contains__(self, name: str) -> bool:
        whole, _, number = name.rpartition("#")
        if not whole:
            return name in self._beginnings
        short = number.isdecimal() and len(number) <= len(str(self.most))
        return whole in self._beginnings and short and 2 <= int(number) <= max(self.most, 2)

    def fit(self, names: Collection[str]) -> bool:
        """Return whether these can be the names of the model's groups: possible ones, and not too many."""
        return len(names) <= self.most and all(name in self for name in names)


def read_importance(text: object, groups: GroupNames | None = None) -> dict[str, float]:
    """Return shares of importance by group name; empty for anything that is not a valid distribution.

    The text comes from a client. One entry that is negative, not a number, or of an impossible group makes the
    whole text invalid; a text that is too long for the model is not read.

    Parameters
    ----------
    text : object
        A JSON object, if it is valid.
    groups : GroupNames, optional
        The possible names, if the model is known.

    Examples
    --------
    >>> read_importance('{"head": 3.0, "conv": 1.0}')
    {'head': 0.75, 'conv': 0.25}
    >>> read_importance('{"head": NaN}')
    {}
    """
    if not isinstance(text, str) or not text:
        return {}
    longest, most = (_LONGEST_TEXT, _MOST_GROUPS)
    if groups is not None:
        longest, most = groups.longest_text, groups.most
    if len(text) > longest:
        return {}
    try:
        found = json.loads(text)
        pairs = {str(name): float(value) for name, value in found.items()}
    except (ValueError, TypeError, AttributeError, RecursionError, OverflowError):
        return {}
    fair = all(0 <= value < float("inf") for value in pairs.values()) and len(pairs) <= most
    total = sum(pairs.values())
    if not fair or not 0 < total < float("inf"):
        return {}
    if groups is not None and not groups.fit(pairs):
        return {}
    return {name: value / total for name, value in pairs.items()}
