"""Run a model on windows of its inner widths: smaller tensors that are views of the model's own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fl_elastic.groups.graph import Width
from fl_elastic.groups.torch_private import BatchNorm, own_buffers, own_parameters


@dataclass(frozen=True)
class Span:
    """A contiguous range of one axis, which wraps around at its end.

    Attributes
    ----------
    axis, first, count : int
        Index of the axis, and first position and length of the range.
    """

    axis: int
    first: int
    count: int

    def pieces(self, size: int) -> list[tuple[int, int]]:
        """Return start and length of its one or two pieces on an axis of this size."""
        inside = min(self.count, size - self.first)
        pieces = [(self.first, inside), (0, self.count - inside)]
        return [piece for piece in pieces if piece[1]]


@dataclass(frozen=True)
class Window:
    """A part of a tensor: a range along some of its axes, and everything along the others.

    Examples
    --------
    >>> window = Window((Span(0, 2, 2),))
    >>> window.take(torch.arange(3)).tolist()
    [2, 0]
    """

    spans: tuple[Span, ...]

    def take(self, whole: Tensor) -> Tensor:
        """Return the part: a view if it is in one piece, else a copy."""
        for span in self.spans:
            pieces = [
                whole.narrow(span.axis, *piece) for piece in span.pieces(whole.shape[span.axis])
            ]
            whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, span.axis)
        return whole

    def is_view(self, whole: Tensor) -> bool:
        """Return whether `take` returns a view."""
        return all(len(span.pieces(whole.shape[span.axis])) == 1 for span in self.spans)

    def put(self, whole: Tensor, part: Tensor) -> None:
        """Write a part into the whole tensor."""
        _put(whole, part, self.spans)


def _put(whole: Tensor, part: Tensor, spans: Sequence[Span]) -> None:
    if not spans:
        whole.copy_(part)
        return
    span, taken = spans[0], 0
    for first, count in span.pieces(whole.shape[span.axis]):
        _put(
            whole.narrow(span.axis, first, count),
            part.narrow(span.axis, taken, count),
            spans[1:],
        )
        taken += count


@dataclass(frozen=True, eq=False)
class Narrow:
    """A parameter and its window, which replaces it.

    Attributes
    ----------
    whole, part : Parameter
        The model's own parameter, and its window.
    window : Window
        Position of the window.
    """

    whole: nn.Parameter
    part: nn.Parameter
    window: Window

    def take(self, whole: Tensor) -> Tensor:
        """Return the window of a tensor of the parameter's shape."""
        return self.window.take(whole)


Spans = dict[str, dict[int, Span]]


def spans_of(model: nn.Module, kept: Mapping[Width, tuple[int, int]]) -> Spans:
    """Return for each module and each axis of its tensors the range that its window keeps.

    Parameters
    ----------
    model : nn.Module
        Not changed.
    kept : mapping of Width to (int, int)
        First unit and number of units of each width's window.
    """
    spans: Spans = defaultdict(dict)
    for width, (start, length) in kept.items():
        first, count = start * width.unit, length * width.unit
        for module in (*width.makers, *width.keepers):
            spans[module][0] = Span(0, first, count)
        for reader in width.readers:
            spans[reader.module][1] = Span(1, first * reader.repeat, count * reader.repeat)
    return dict(spans)


@contextmanager
def windowed(
    model: nn.Module, kept: Mapping[Width, tuple[int, int]], *, scaled: bool = True
) -> Iterator[list[Narrow]]:
    """Replace a model's tensors by windows of some widths inside the context, and restore them afterwards.

    Layers hold smaller parameters, which share memory with the whole ones if a window is in one piece. A window in
    two pieces is a copy, which the caller must write back. Batch norms in training mode use the statistics of the
    batch and do not update running statistics, because those of a window are not those of the model.

    Parameters
    ----------
    model : nn.Module
        The model of the widths.
    kept : mapping of Width to (int, int)
        First unit and number of units of each width's window.
    scaled : bool
        Whether the input of layers that read windows is multiplied by the number of units over the number kept
        (inverted dropout), unless a following batch norm undoes any scale.

    Yields
    ------
    list of Narrow
        Every replaced parameter with its window.
    """
    narrow: list[Narrow] = []
    with ExitStack() as stack:
        for name, axes in spans_of(model, kept).items():
            stack.enter_context(_smaller(model.get_submodule(name), axes, narrow))
        for norm in model.modules():
            if isinstance(norm, BatchNorm) and norm.training and norm.track_running_stats:
                norm.track_running_stats = False
                stack.callback(setattr, norm, "track_running_stats", True)
        for width, (_, length) in kept.items() if scaled else ():
            for reader in width.readers:
                if not (reader.norm and model.get_submodule(reader.norm).training):
                    scale = _Scale(width.size / length)
                    hook = model.get_submodule(reader.module).register_forward_pre_hook(scale)
                    stack.callback(hook.remove)
        yield narrow


class _Scale:
    """Multiplies the input of a layer."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        del module
        return inputs[0] * self._factor


@contextmanager
def _smaller(module: nn.Module, axes: Mapping[int, Span], narrow: list[Narrow]) -> Iterator[None]:
    own: dict[str, nn.Parameter] = {
        name: parameter
        for name, parameter in own_parameters(module).items()
        if parameter is not None
    }
    buffers = own_buffers(module)
    statistics = {n: b for n, b in buffers.items() if b is not None and b.dim() == 1}
    sizes = _sizes(module, axes)
    before = {name: getattr(module, name) for name in sizes}
    try:
        for name, whole in own.items():
            window = Window(tuple(axes[axis] for axis in sorted(axes) if axis < whole.dim()))
            if window.spans:
                part = nn.Parameter(window.take(whole.detach()), requires_grad=whole.requires_grad)
                narrow.append(Narrow(whole, part, window))
                setattr(module, name, part)
        for name, statistic in statistics.items() if 0 in axes else ():
            buffers[name] = Window((axes[0],)).take(statistic)
        for name, size in sizes.items():
            setattr(module, name, size)
        yield
    finally:
        for name, whole in own.items():
            setattr(module, name, whole)
        buffers.update(statistics)
        for name, size in before.items():
            setattr(module, name, size)


def _sizes(module: Any, axes: Mapping[int, Span]) -> dict[str, int]:
    """Return the size attributes of a layer (such as its number of channels) with the values for its windows."""
    out, taken = axes.get(0), axes.get(1)
    sizes: dict[str, int] = {}
    if isinstance(module, nn.GroupNorm):
        if out is not None:
            sizes["num_channels"] = out.count
            sizes["num_groups"] = out.count * module.num_groups // module.num_channels
        return sizes
    names = {
        nn.Linear: ("out_features", "in_features"),
        BatchNorm: ("num_features", ""),
    }
    given = next((n for kind, n in names.items() if isinstance(module, kind)), None)
    outputs, inputs = given or ("out_channels", "in_channels")
    if out is not None:
        sizes[outputs] = out.count
        if given is None and module.groups > 1:
            # A depthwise convolution.
            sizes["groups"] = sizes[inputs] = out.count
    if taken is not None:
        sizes[inputs] = taken.count
    return sizes
