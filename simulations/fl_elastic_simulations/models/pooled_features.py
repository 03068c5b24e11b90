"""Pooled features before the last ReLU, of models that end in a pooling and a linear layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fl_elastic.errors import ModelError
from fl_elastic.training.evaluate import evaluating

_RELUS = ("relu", "relu_", "relu6", "hardtanh", "hardtanh_")
_POOLS = ("adaptive_avg_pool2d", "avg_pool2d", "mean")
_DROPOUTS = ("dropout", "dropout_", "feature_dropout")
# Operations that move numbers without changing them, or that commute with a ReLU, may lie between.
_BETWEEN = (*_POOLS, *_DROPOUTS, "max_pool2d", "adaptive_max_pool2d", "flatten", "reshape", "view",
            "squeeze", "contiguous")  # fmt: skip


@dataclass(frozen=True)
class FeaturePlace:
    """The place of a model's features, in terms of the calls of one forward pass.

    Attributes
    ----------
    linear : int
        Number of the call of a linear function that returns the class scores, from 0.
    relu : int or None
        Number of the call of a ReLU before the pooling; None if there is none, and features are as pooled.
    dropouts : tuple of int
        Numbers of the calls of dropouts between the two.
    head : tuple of str
        Tensors of the linear layer in the model's state.
    width : int
        Number of features.
    """

    linear: int
    relu: int | None
    dropouts: tuple[int, ...]
    head: tuple[str, ...]
    width: int


@dataclass(frozen=True, eq=False)
class _Call:
    name: str
    number: int
    taken: Any
    weight: Any
    given: Any


class _Numbering(TorchFunctionMode):
    """Numbers the calls of each kind in a forward pass, from 0."""

    def __init__(self) -> None:
        super().__init__()
        self._counts = Counter[str]()

    def number(self, kind: str) -> int:
        self._counts[kind] += 1
        return self._counts[kind] - 1


class _Recording(_Numbering):
    """Records the calls of a forward pass that return tensors, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor):
            kind = _kind(func, args, kwargs or {})
            taken = args[0] if args else (kwargs or {}).get("input")
            weight = args[1] if len(args) > 1 else (kwargs or {}).get("weight")
            self.calls.append(_Call(kind, self.number(kind), taken, weight, found))
        return found


class _Leaving(_Numbering):
    """Skips the last ReLU and the dropouts after it, and keeps the input of the last linear layer."""

    def __init__(self, place: FeaturePlace) -> None:
        super().__init__()
        self._left_out = {("relu", place.relu), *(("dropout", each) for each in place.dropouts)}
        self._last = ("linear", place.linear)
        self.entering: Tensor | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kind = _kind(func, args, kwargs or {})
        if kind not in ("relu", "dropout", "linear"):
            return func(*args, **(kwargs or {}))
        call = kind, self.number(kind)
        taken = args[0] if args else (kwargs or {})["input"]
        if call == self._last:
            self.entering = taken
        return taken if call in self._left_out else func(*args, **(kwargs or {}))


def find_features(model: nn.Module, inputs: Tensor) -> FeaturePlace:
    """Return the place of a model's features: those pooled before its last linear layer, before the last ReLU.

    The model runs once, in eval mode, and is unchanged afterwards. ReLU and ReLU6 count as ReLU, since they cut at
    zero. If another function or none is before the pooling, as in EfficientNet, features are as pooled.

    Parameters
    ----------
    model : nn.Module
        A model that returns one tensor of class scores.
    inputs : Tensor
        A few examples.

    Raises
    ------
    ModelError
        If the model does not end like this; the message says what it has instead.

    Examples
    --------
    >>> import torch
    >>> body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    >>> find_features(nn.Sequential(body, nn.Linear(8, 2)), torch.zeros(1, 3, 8, 8))
    FeaturePlace(linear=0, relu=0, dropouts=(), head=('1.weight', '1.bias'), width=8)
    """
    recording = _Recording()
    with evaluating(model), recording:
        output = model(inputs)
    calls = recording.calls
    end = _last_giving(calls, len(calls), output)
    if end is None or calls[end].name != "linear":
        seen = "nothing that is known" if end is None else repr(calls[end].name)
        raise _refused(f"its output comes from {seen}, not from a linear layer")
    last = calls[end]
    head = _head(model, last)
    dropouts, pooled, relu, at = [], False, None, end
    while True:
        before = _last_giving(calls, at, calls[at].taken)
        kind = "its input" if before is None else calls[before].name
        if kind == "relu" and pooled:
            assert before is not None
            relu = calls[before].number
        elif before is not None and kind in _BETWEEN:
            pooled |= kind in _POOLS
            dropouts += [calls[before].number] if kind == "dropout" else []
            at = before
            continue
        if not pooled:
            raise _refused(f"{kind!r} stands between its last linear layer and a pooling")
        return FeaturePlace(last.number, relu, tuple(dropouts), head, int(last.taken.shape[-1]))


def pooled_features(model: nn.Module, place: FeaturePlace, inputs: Tensor) -> Tensor:
    """Return the features of a batch, shape (n, width), with their graph if gradients are enabled.

    The model runs in its present mode.

    Raises
    ------
    ModelError
        If the forward pass differs from the one in which the place was found.
    """
    leaving = _Leaving(place)
    with leaving:
        model(inputs)
    found = leaving.entering
    if found is None or found.shape != (len(inputs), place.width):
        raise _refused("its forward pass differs from the one in which they were found")
    return found


def _kind(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    name = getattr(func, "__name__", "")
    if name in _DROPOUTS:
        return "dropout"
    if name not in _RELUS:
        return name
    if name.startswith("hardtanh"):
        low = kwargs.get("min_val", args[1] if len(args) > 1 else -1.0)
        return "relu" if low == 0 else name
    return "relu"


def _last_giving(calls: Sequence[_Call], before: int, tensor: Any) -> int | None:
    """Return the last earlier call that returned this very tensor; None if it came from outside."""
    return next((i for i in reversed(range(before)) if calls[i].given is tensor), None)


def _head(model: nn.Module, call: _Call) -> tuple[str, ...]:
    """Return the names of the tensors of the linear layer that was called."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module.weight is call.weight and call.taken.dim() == 2:
            start = f"{name}." if name else ""
            return tuple(start + own for own, _ in module.named_parameters(recurse=False))
    raise _refused("its last linear layer is no nn.Linear on one vector per example")


def _refused(reason: str) -> ModelError:
    return ModelError(
        f"no pooled features: {reason}; give a model that ends in a pooling and a linear layer"
    )
