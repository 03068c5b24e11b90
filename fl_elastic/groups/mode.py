"""How one tensor group is trained: the modes that costs, plans and gradient operations share."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from fl_elastic.errors import PlanError
from fl_elastic.groups.graph import TensorGroup

Axis = Literal["in", "out", "neuron"]
_KINDS = ("frozen", "bias", "channels", "filtered", "full")
_CHANNELS = re.compile(r"(in|out|neuron)/(\d+(?:\.\d+)?)")
# Tolerance for fractions such as 3/7, which have no exact binary form.
_ROUNDING = 1e-9
_FILTERED = re.compile(r"(w|wx)(\d+)")


@dataclass(frozen=True)
class Mode:
    """How a tensor group is trained.

    Use the constants `FROZEN`, `BIAS` and `FULL`, and the constructors `channels` and `filtered`.

    Attributes
    ----------
    kind : {"frozen", "bias", "channels", "filtered", "full"}
        Which part of the group is trained.
    fraction : float
        Share of the channels whose weights are trained, in (0, 1]; 1 unless ``kind`` is "channels".
    axis : {"in", "out", "neuron"}
        The channels that ``fraction`` refers to. "in": input channels. "out": output channels; all of the bias is
        trained. "neuron": output channels, each with its own bias, and entries of a norm.
    patch : int
        Side r of the patches of a filtered gradient; 1 unless ``kind`` is "filtered".
    filters_input : bool
        Whether the input gradient is filtered as well (WX) or exact (W).

    Examples
    --------
    >>> [str(mode) for mode in (Mode.FULL, Mode.channels(0.25), Mode.filtered(2), Mode.filtered(4, inputs=True))]
    ['full', 'in/4', 'w2', 'wx4']
    >>> Mode.parse("out/8") == Mode.channels(1 / 8, axis="out")
    True
    """

    kind: str
    fraction: float = 1.0
    axis: Axis = "in"
    patch: int = 1
    filters_input: bool = False

    FROZEN: ClassVar[Mode]
    BIAS: ClassVar[Mode]
    FULL: ClassVar[Mode]

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise PlanError(f"mode {self.kind!r} is unknown, use one of {', '.join(_KINDS)}")
        if not 0 < self.fraction <= 1:
            raise PlanError(f"channel fraction {self.fraction} is not in (0, 1]")
        if self.axis not in get_args(Axis):
            raise PlanError(f"channel axis {self.axis!r} is unknown, use in, out or neuron")
        if self.patch < 1:
            raise PlanError(f"patch side {self.patch} must be at least 1")

    @classmethod
    def channels(cls, fraction: float, axis: Axis = "in") -> Mode:
        """Return the mode that trains ``fraction`` of a layer's channels, and its bias.

        Along axis ``neuron`` only the biases of the chosen neurons are trained.
        """
        return cls("channels", fraction=fraction, axis=axis)

    @classmethod
    def filtered(cls, patch: int, *, inputs: bool = False) -> Mode:
        """Return the mode of a gradient filtered over patches of side ``patch``."""
        return cls("filtered", patch=patch, filters_input=inputs)

    @classmethod
    def parse(cls, text: str) -> Mode:
        """Return the mode whose ``str`` is ``text``; raise PlanError for any other text."""
        if text in ("frozen", "bias", "full"):
            return cls(text)
        if (found := _CHANNELS.fullmatch(text)) and float(found[2]) >= 1:
            axis: Axis = next(each for each in get_args(Axis) if each == found[1])
            return cls.channels(1 / float(found[2]), axis)
        if found := _FILTERED.fullmatch(text):
            return cls.filtered(int(found[2]), inputs=found[1] == "wx")
        raise PlanError(
            f"mode {text!r} is unknown, use frozen, bias, full, in/4, out/4, neuron/4, w2 or wx2 (any number)"
        )

    def __str__(self) -> str:
        if self.kind == "channels":
            return f"{self.axis}/{1 / self.fraction:g}"
        if self.kind == "filtered":
            return f"{'wx' if self.filters_input else 'w'}{self.patch}"
        return self.kind

    @property
    def is_frozen(self) -> bool:
        """Whether nothing of the group is trained."""
        return self.kind == "frozen"

    @property
    def needs_operations(self) -> bool:
        """Whether layers in this mode need another backward pass than that of torch's own layers."""
        return self.kind in ("channels", "filtered")

    def trains(self, group: TensorGroup) -> tuple[str, ...]:
        """Return the names of the parameters of ``group`` that this mode trains, whole or in part."""
        if self.is_frozen:
            return ()
        return group.vectors() if self.kind == "bias" else group.parameters

    def channel_count(self, channels: int) -> int:
        """Return how many of ``channels`` are trained: the share ``fraction``, rounded down, at least one."""
        return max(1, int(channels * self.fraction + _ROUNDING))

    def trains_part_of(self, shape: Sequence[int]) -> bool:
        """Return whether this mode trains only a part of a parameter of this shape."""
        return self.kind == "channels" and (len(shape) > 1 or self.axis == "neuron")


Mode.FROZEN = Mode("frozen")
Mode.BIAS = Mode("bias")
Mode.FULL = Mode("full")


def sent_bytes(group: TensorGroup, mode: Mode) -> float:
    """Return the bytes, as fp32, that an update holds of a group trained in ``mode``."""
    sent, total = mode.trains(group), 0.0
    copies = group.copies or (1,) * len(group.parameters)
    for name, shape, times in zip(group.parameters, group.shapes, copies, strict=True):
        size = 4.0 * times * math.prod(shape) if name in sent else 0.0
        if mode.trains_part_of(shape) and size:
            # A depthwise weight has its channels on the first axis only.
            channels = shape[0] if mode.axis != "in" or shape[1] == 1 else shape[1]
            size *= mode.channel_count(channels) / channels
        total += size
    return total + 4.0 * group.statistics if sent else 0.0
