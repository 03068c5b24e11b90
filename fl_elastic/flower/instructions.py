"""What one client is told in one round besides the model, and the words of a message's config that tell it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from fl_elastic.errors import PlanError, UpdateError
from fl_elastic.update.partial import MAX_VERSION

if TYPE_CHECKING:
    from fl_elastic.flower.group_names import GroupNames

__all__ = [
    "BLEND",
    "CHANGE",
    "DEADLINE",
    "GROUPS",
    "IMPORTANCE",
    "KEEP",
    "OVERDUE",
    "PLACES",
    "RATE",
    "ROUND_ZERO",
    "SEED",
    "SQUARES",
    "Instructions",
    "read_groups",
    "read_importance",
]

# Each as the attribute of `Instructions` is called: those that others look at as well.
BLEND = "fl_elastic.blend"
CHANGE = "fl_elastic.change"
DEADLINE = "fl_elastic.deadline"
GROUPS = "fl_elastic.groups"
IMPORTANCE = "fl_elastic.importance"
KEEP = "fl_elastic.keep"
OVERDUE = "fl_elastic.overdue"
PLACES = "fl_elastic.places"
RATE = "fl_elastic.rate"
ROUND_ZERO = "fl_elastic.round-zero"
SEED = "fl_elastic.seed"
SQUARES = "fl_elastic.squares"

_FLOWERS_RATE = "lr"
_MOST_GROUPS = 10_000
_LONGEST_TEXT = 1 << 20


@dataclass(frozen=True)
class Instructions:
    """What one client is told in one round; hashable, so that clients told the same share one message content.

    Attributes
    ----------
    deadline : float, optional
        Seconds for training and sending.
    overdue : bool
        Whether what was left out longest must be trained now.
    importance : str
        The fleet's mean importance by group name, as JSON; empty for none.
    blend : float
        Its weight; a positive one asks the client to report its own importance.
    seed : int, optional
        Of random choices.
    change : str
        Sum of squares of the last round's change by tensor, as JSON; empty for none.
    keep : bool
        Whether to keep the model, so that only what changes need be sent next time.
    groups : str
        Names of the groups to train, as a JSON list; empty to let the client choose.
    round_zero : bool
        Whether to send sums for a head in closed form instead of training.
    read : str
        Places of the model that its head reads (`fl_elastic.readout.place`); empty for the model as it is.
    places : str
        Among which places the server chooses, ``auto`` for all: the client is to send what ranks them instead of
        training; empty for no such question.
    examples : int
        How many examples that is of.
    cut : str
        The deepest group that anybody trains; empty for none.
    kept_head : str
        Group of the head that the server solves for and nobody trains; empty for none.
    keep_statistics : bool
        Whether norms keep their statistics.
    rate : float
        Factor of the optimiser's learning rate, in (0, 1].
    lr : float, optional
        The learning rate in place of the optimiser's own, under the key that Flower's apps use for it.
    squares : bool
        Whether to send squares of gradients instead of training, so that examples can be forgotten.
    losses : bool
        Whether to say what loss the model has on the client's examples, instead of training.
    codec : str
        How to write the update, in place of the client's own codec; empty for that.
    feature_precision : str
        How to keep features at the cut, in place of the client's own precision; empty for that.
    forgotten : str
        The client's wish to have examples forgotten that was met; empty for none.
    cut_worth : bool
        Whether to say what training down to each place would gain, instead of training.
    """

    deadline: float | None = None
    overdue: bool = False
    importance: str = ""
    blend: float = 0.0
    seed: int | None = None
    change: str = ""
    keep: bool = False
    groups: str = ""
    round_zero: bool = False
    read: str = ""
    places: str = ""
    examples: int = 0
    cut: str = ""
    kept_head: str = ""
    keep_statistics: bool = False
    cut_worth: bool = False
    squares: bool = False
    losses: bool = False
    forgotten: str = ""
    codec: str = ""
    feature_precision: str = ""
    rate: float = 1.0
    lr: float | None = None

    @property
    def trains(self) -> bool:
        """Whether the client is asked to train or test, and not for something that only the library's know."""
        return not (self.round_zero or self.places or self.cut_worth or self.squares or self.losses)

    @property
    def wants_importance(self) -> bool:
        """Whether the client is to report its importance."""
        return self.blend > 0 or bool(self.groups)

    def to_config(self) -> dict[str, Any]:
        """Return the entries of a message's config, only those that say something."""
        said = {
            _key(each.name): getattr(self, each.name)
            for each in fields(self)
            if getattr(self, each.name) != each.default
        }
        # The rate in place of the optimiser's own is in the config that the server's user gives.
        said.pop(_FLOWERS_RATE, None)
        return said

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Instructions:
        """Read the entries of a message's config.

        Raises
        ------
        UpdateError
            If one of them is not what it should be.
        """
        read: dict[str, Any] = {}
        for each in fields(cls):
            key = _key(each.name)
            default: Any = each.default
            if isinstance(default, (bool, str)):
                read[each.name] = type(default)(config.get(key, default))
            elif type(default) is int:
                read[each.name] = int(_number(config, key, default) or 0)
            else:
                read[each.name] = _number(config, key, default)
        rate, blend, seed = read["rate"] or 0.0, read["blend"] or 0.0, read["seed"]
        if not 0 < rate <= 1:
            raise UpdateError(f"config {RATE} = {rate} is not above 0 and at most 1")
        return cls(
            **read | {"rate": rate, "blend": blend, "seed": seed if seed is None else int(seed)}
        )

    def importance_by_group(self) -> dict[str, float]:
        """Return the importance by group name; empty if there is none or it cannot be read."""
        return read_importance(self.importance)


def _key(name: str) -> str:
    """Return the config's word for an attribute of `Instructions`.

    >>> _key("round_zero"), _key("lr")
    ('fl_elastic.round-zero', 'lr')
    """
    return name if name == _FLOWERS_RATE else f"fl_elastic.{name.replace('_', '-')}"


def _number(config: Mapping[str, Any], key: str, default: float | None) -> float | None:
    value = config.get(key, default)
    if value is None:
        return None
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value <= MAX_VERSION:
        raise UpdateError(f"config {key} = {str(value)[:40]!r} is not a number from 0")
    return float(value) if isinstance(value, float) else value


def read_groups(text: str) -> tuple[str, ...]:
    """Return the names in ``groups`` of `Instructions`; raises PlanError if it is no list of names.

    >>> read_groups('["head", "conv"]')
    ('head', 'conv')
    """
    try:
        names = json.loads(text)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("not a list of names")
    except (ValueError, RecursionError) as error:
        raise PlanError(f"groups {text[:40]!r} cannot be read: {error}") from None
    return tuple(names)


def read_importance(text: object, groups: GroupNames | None = None) -> dict[str, float]:
    """Return shares of importance by group name; empty for anything that is not a fair distribution.

    It comes from outside: an entry that is negative, not a number, or of a group that the model cannot have spoils
    the whole, and a text that is too long for the model is not read.

    Parameters
    ----------
    text : object
        A JSON object, if it is what it should be.
    groups : GroupNames, optional
        Which names are possible, where the model is known.

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
