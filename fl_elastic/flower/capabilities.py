"""Capabilities that a device reports: its speed, and the costs and importance of the model's tensor groups."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from fl_elastic.budget import Budget
from fl_elastic.errors import UpdateError
from fl_elastic.profiling import CostProfile
from fl_elastic.update import Manifest
from fl_elastic.update.manifest import Role

_MOST_SHARES, _LONGEST_SHARES = 10_000, 1 << 20
# Characters of a JSON entry besides the group's name: digits of the number, quotes, colon and comma.
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
        """Return whether the model's groups can have these names: each is possible, and there are not too many."""
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
    longest, most = _LONGEST_SHARES, _MOST_SHARES
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


_MOST_GROUPS = 100_000
_LONGEST_GROUP = 500
_LONGEST_TEXT = 1 << 22
_MOST = 1e15
_LONGEST_NAME = 80
# Largest claims that are accepted: steps and examples as in an update, and eleven days for one step.
_MOST_STEPS, _MOST_EXAMPLES, _MOST_SECONDS, _MOST_BYTES = 10**6, 10**8, 1e6, 1e15


@dataclass(frozen=True)
class GroupCosts:
    """Costs of one training step by tensor group; tuples are in backward order.

    Attributes
    ----------
    names : tuple of str
        Names of the groups.
    update_seconds, path_seconds : tuple of float
        As in `CostProfile`.
    sent_bytes : tuple of float
        Size of each group's weights as fp32.
    constant_seconds : float
        Time of every step regardless of what is trained.
    head : int
        Index of the group that is always trained.
    """

    names: tuple[str, ...]
    update_seconds: tuple[float, ...]
    path_seconds: tuple[float, ...]
    sent_bytes: tuple[float, ...]
    constant_seconds: float
    head: int

    @classmethod
    def of(cls, profile: CostProfile) -> GroupCosts:
        """Return the costs of a profile."""
        return cls(
            names=profile.group_names,
            update_seconds=tuple(profile.update_seconds.tolist()),
            path_seconds=tuple(profile.path_seconds.tolist()),
            sent_bytes=tuple(profile.parameter_bytes.tolist()),
            constant_seconds=float(profile.forward_seconds[0]) + profile.fixed_seconds,
            head=int(profile.graph.head),
        )

    def slowed(self, slowdown: float) -> GroupCosts:
        """Return the costs of a device that is ``slowdown`` times slower."""
        return replace(
            self,
            update_seconds=tuple(slowdown * seconds for seconds in self.update_seconds),
            path_seconds=tuple(slowdown * seconds for seconds in self.path_seconds),
            constant_seconds=slowdown * self.constant_seconds,
        )

    def to_json(self) -> str:
        """Return the costs as a JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: object) -> GroupCosts:
        """Read what `to_json` wrote; raise UpdateError for anything else."""
        try:
            if not isinstance(text, str):
                raise TypeError("not text")
            if len(text) > _LONGEST_TEXT:
                raise ValueError(f"{len(text)} characters, at most {_LONGEST_TEXT} are read")
            fields = json.loads(text)
            found = cls(
                names=tuple(str(name) for name in fields["names"]),
                update_seconds=tuple(float(seconds) for seconds in fields["update_seconds"]),
                path_seconds=tuple(float(seconds) for seconds in fields["path_seconds"]),
                sent_bytes=tuple(float(count) for count in fields["sent_bytes"]),
                constant_seconds=float(fields["constant_seconds"]),
                head=int(fields["head"]),
            )
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise UpdateError(f"costs of groups cannot be read: {str(error)[:80]}") from None
        found._check()
        return found

    def _check(self) -> None:
        count = len(self.names)
        columns = (self.update_seconds, self.path_seconds, self.sent_bytes)
        fits = 0 < count <= _MOST_GROUPS and 0 <= self.head < count
        fits &= all(len(column) == count for column in columns)
        distinct = len(set(self.names)) == count
        short = all(len(name) <= _LONGEST_GROUP for name in self.names)
        numbers = np.array([*chain(*columns), self.constant_seconds])
        if not (fits and distinct and short and ((numbers >= 0) & (numbers <= _MOST)).all()):
            raise UpdateError(
                f"costs of {count} groups must have a distinct name and three numbers from 0 for each group"
            )


@dataclass(frozen=True)
class Capabilities:
    """What one client can do in a round; all times are measured or estimated on its own device.

    Attributes
    ----------
    device : str
        Class of the device; coverage is counted per class.
    num_examples : int
        Number of local training examples.
    steps : int
        Local steps of a whole round.
    full_step_seconds : float
        Time of a step that trains everything.
    model_bytes : float
        Size of the model's parameters as fp32.
    bandwidth : float
        Uplink in bytes per second, counted as the fp32 size of the tensors before encoding; 0 if not known.
    allowed_step_seconds : float
        Time that the device's own budget allows for a step; 0 for no limit.
    groups : GroupCosts, optional
        Costs of each tensor group, for a server that makes the plans.
    """

    device: str
    num_examples: int
    steps: int
    full_step_seconds: float
    model_bytes: float
    bandwidth: float = 0.0
    allowed_step_seconds: float = 0.0
    groups: GroupCosts | None = None

    @classmethod
    def of(
        cls, profile: CostProfile, budget: Budget, *, device: str, num_examples: int, steps: int
    ) -> Capabilities:
        """Return what a device with these costs and this budget can do in a round of ``steps`` steps."""
        allowed = budget.allowed_step_seconds(profile.full_step_seconds, steps)
        return cls(
            device=device,
            num_examples=num_examples,
            steps=steps,
            full_step_seconds=profile.full_step_seconds,
            model_bytes=float(profile.parameter_bytes.sum()),
            bandwidth=budget.bandwidth or 0.0,
            allowed_step_seconds=allowed if math.isfinite(allowed) else 0.0,
            groups=GroupCosts.of(profile),
        )

    def bounded(self, groups: GroupNames | None) -> Capabilities:
        """Return the capabilities with claims limited to what the model allows; unchanged if ``groups`` is None.

        Claimed bytes are at most the model's. Costs are dropped if they name groups that the model cannot have.
        """
        if groups is None:
            return self
        costs = self.groups if self.groups is not None and groups.fit(self.groups.names) else None
        return replace(self, groups=costs, model_bytes=min(self.model_bytes, groups.model_bytes))

    @property
    def full_round_seconds(self) -> float:
        """Seconds to train everything in every step, and to send it."""
        sending = self.model_bytes / self.bandwidth if self.bandwidth > 0 else 0.0
        return self.steps * self.full_step_seconds + sending

    def to_metrics(self) -> dict[str, Any]:
        """Return the capabilities as the metrics of a reply."""
        groups = {} if self.groups is None else {"group-costs": self.groups.to_json()}
        return {
            **groups,
            "allowed-step-seconds": self.allowed_step_seconds,
            "device": self.device,
            "num-examples": self.num_examples,
            "steps": self.steps,
            "full-step-seconds": self.full_step_seconds,
            "model-bytes": self.model_bytes,
            "bandwidth": self.bandwidth,
        }

    @classmethod
    def from_metrics(cls, metrics: Mapping[str, Any]) -> Capabilities:
        """Read what `to_metrics` wrote; raise UpdateError for anything else."""
        return cls(
            device=" ".join(str(metrics.get("device", ""))[:_LONGEST_NAME].split()),
            num_examples=int(_number(metrics, "num-examples", 1, _MOST_EXAMPLES)),
            steps=int(_number(metrics, "steps", 1, _MOST_STEPS)),
            full_step_seconds=_number(metrics, "full-step-seconds", 1e-9, _MOST_SECONDS),
            model_bytes=_number(metrics, "model-bytes", 0, _MOST_BYTES),
            bandwidth=_number(metrics, "bandwidth", 0, _MOST_BYTES),
            allowed_step_seconds=_number(metrics, "allowed-step-seconds", 0, _MOST_SECONDS),
            groups=None
            if "group-costs" not in metrics
            else GroupCosts.from_json(metrics["group-costs"]),
        )


def _number(metrics: Mapping[str, Any], name: str, lowest: float, highest: float) -> float:
    value = metrics.get(name)
    usable = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not usable or not lowest <= value <= highest:  # type: ignore[operator]
        raise UpdateError(
            f"capability {name!r} is {str(value)[:40]!r}, expected a number from {lowest:g} to {highest:g}"
        )
    return float(value)  # type: ignore[arg-type]
