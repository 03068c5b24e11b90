"""Random tiny models: any layers of torch in any order, joined in the ways in which people join them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

Shape = tuple[int, ...]
Batch = tuple[Tensor, Tensor]
Make = Callable[["np.random.Generator", Shape], nn.Module]

_CLASSES = 3


@dataclass(frozen=True)
class RandomModel:
    """A model, batches for it, and what to know of it.

    Attributes
    ----------
    model : nn.Module
        In training mode.
    batches : list of (Tensor, Tensor)
        Inputs and classes, all of one size.
    is_random : bool
        Whether a forward pass draws random numbers.
    """

    model: nn.Module
    batches: list[Batch]
    is_random: bool


class OwnNorm(nn.Module):
    """A norm of the user's own over the last or the second axis, with buffers that it assigns or writes."""

    def __init__(self, features: int, axis: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("square", torch.ones(features))
        self.scale = nn.Parameter(torch.ones(features))
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        """Normalise by running statistics."""
        y = x.movedim(self.axis, -1)
        if self.training:
            with torch.no_grad():
                flat = y.flatten(0, -2)
                self.mean = 0.9 * self.mean + 0.1 * flat.mean(0)
                self.square.mul_(0.9).add_(0.1 * flat.square().mean(0))
        y = self.scale * (y - self.mean) / (self.square + 1e-3).sqrt()
        return y.movedim(-1, self.axis)


class Apply(nn.Module):
    """A function without parameters."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Call it."""
        return self.function(x)


class FunctionalDropout(nn.Module):
    """``F.dropout`` that follows the module's mode."""

    def forward(self, x: Tensor) -> Tensor:
        """Drop a fifth."""
        return functional.dropout(x, 0.2, self.training)


class Scaled(nn.Module):
    """A parameter of its own outside of any layer, and a view in place."""

    def __init__(self, features: int, axis: int) -> None:
        super().__init__()
        shape = [1, 1, 1]
        shape[axis - 1] = features
        self.factor = nn.Parameter(torch.ones(features))
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        """Scale one axis."""
        y = x.movedim(self.axis, -1) * self.factor
        return y.movedim(-1, self.axis)


class Residual(nn.Module):
    """A short cut around layers, with the sum rectified in place or not at all."""

    def __init__(self, body: nn.Module, ending: str) -> None:
        super().__init__()
        self.body = body
        self.ending = ending

    def forward(self, x: Tensor) -> Tensor:
        """Add the short cut."""
        y = self.body(x) + x
        if self.ending == "relu_":
            return y.relu_()
        return functional.relu(y) if self.ending == "relu" else y


class Halves(nn.Module):
    """Two branches on two halves of the channels, concatenated."""

    def __init__(self, one: nn.Module, other: nn.Module, axis: int) -> None:
        super().__init__()
        self.one = one
        self.other = other
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        """Join the halves the other way round."""
        left, right = x.chunk(2, dim=self.axis)
        return torch.cat([self.other(right), self.one(left)], dim=self.axis)


class Twice(nn.Module):
    """One module that is called two times."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        """Call it twice."""
        return self.body(torch.tanh(self.body(x)))


class Tied(nn.Module):
    """Two linear layers with one weight, on the last axis."""

    def __init__(self, features: int, transposed: bool) -> None:
        super().__init__()
        self.first = nn.Linear(features, features)
        self.second = nn.Linear(features, features)
        self.transposed = transposed
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        """Use the weight twice."""
        y = functional.relu(self.first(x))
        if self.transposed:
            return functional.linear(y, self.second.weight.t(), self.second.bias)
        out: Tensor = self.second(y)
        return out


class Experts(nn.Module):
    """Experts of which a batch uses the one that its content names."""

    def __init__(self, *experts: nn.Module) -> None:
        super().__init__()
        self.experts = nn.ModuleList(experts)

    def forward(self, x: Tensor) -> Tensor:
        """Route by the sign of the first numbers."""
        chosen = int(x.detach().flatten()[0] > 0)
        out: Tensor = self.experts[chosen](x)
        return out


class LayerDrop(nn.Module):
    """A residual layer that is left out at random while training."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        """Skip it in a third of the steps."""
        if self.training and torch.rand(()) < 0.33:
            return x
        return x + 0.5 * self.body(x)


class SelfAttention(nn.Module):
    """Torch's attention, perhaps behind a learned token; ``[N, T, F]``."""

    def __init__(self, features: int, *, token: bool, own: bool) -> None:
        super().__init__()
        self.token = nn.Parameter(0.1 * torch.randn(1, 1, features)) if token else None
        self.own = own
        if own:
            self.qkv = nn.Linear(features, 3 * features, bias=False)
            self.out = nn.Linear(features, features)
        else:
            self.attention = nn.MultiheadAttention(features, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Attend, and leave the token out again."""
        y = x
        if self.token is not None:
            y = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        if self.own:
            q, k, v = self.qkv(y).chunk(3, dim=-1)
            z = torch.softmax(q @ k.transpose(1, 2) / q.shape[-1] ** 0.5, dim=-1) @ v
            z = self.out(z)
        else:
            z = self.attention(y, y, y, need_weights=False)[0]
        return x + z[:, -x.shape[1] :] if self.token is None else x + z[:, 1:] + z[:, :1]


class Recurrent(nn.Module):
    """A recurrent layer that keeps the width; ``[N, T, F]``."""

    def __init__(self, kind: str, features: int, layers: int, both: bool) -> None:
        super().__init__()
        cell = {"gru": nn.GRU, "lstm": nn.LSTM, "rnn": nn.RNN}[kind]
        width = features // 2 if both else features
        self.cell = cell(features, width, num_layers=layers, batch_first=True, bidirectional=both)  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        """Return all states."""
        out: Tensor = self.cell(x)[0]
        return out


class Cell(nn.Module):
    """A cell that the user steps through time."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(features, features)

    def forward(self, x: Tensor) -> Tensor:
        """Return all states."""
        state, states = x.new_zeros(len(x), x.shape[2]), []
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            states.append(state)
        return torch.stack(states, dim=1)


class Whole(nn.Module):
    """Body and head, or two heads between which the batch's content decides."""

    def __init__(
        self, body: nn.Module, head: nn.Module, other: nn.Module | None, writes: bool, average: bool
    ) -> None:
        super().__init__()
        self.body = body
        self.head = head
        self.other = other
        self.writes = writes
        self.average = average

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the classes."""
        sign = bool(x.detach().flatten()[0] > 0)
        if self.writes:
            x.mul_(0.5)
        y = self.body(x)
        if self.average:
            axes = (
                (1,)
                if y.dim() == 3 and self.head.in_features == y.shape[2]
                else tuple(range(2, y.dim()))
            )  # type: ignore[operator]
            y = y.mean(axes) if y.dim() > 2 else y
        else:
            y = y.flatten(1)
        chosen = self.other if self.other is not None and sign else self.head
        out: Tensor = chosen(y)  # type: ignore[misc]
        return out


def _flip(generator: np.random.Generator, chance: float = 0.5) -> bool:
    return bool(generator.random() < chance)


def _parametrised(generator: np.random.Generator, layer: nn.Module) -> nn.Module:
    draw = generator.random()
    if draw < 0.12:
        return parametrizations.weight_norm(layer)
    if draw < 0.22:
        return parametrizations.spectral_norm(layer)
    return layer


def _convolution(generator: np.random.Generator, shape: Shape) -> nn.Module:
    """Return a convolution of any kind that keeps the number of axes."""
    dimensions, channels = len(shape) - 1, shape[0]
    outputs = int(generator.choice([4, 6, 8]))
    groups = int(generator.choice([1, 1, 2, channels if outputs % channels == 0 else 1]))
    if channels % groups or outputs % groups:
        groups = 1
    small = min(shape[1:]) < 4
    bias = _flip(generator)
    if not small and _flip(generator, 0.15):
        kind = nn.ConvTranspose1d if dimensions == 1 else nn.ConvTranspose2d
        stride = 2 if max(shape[1:]) <= 4 and _flip(generator) else 1
        padding = int(generator.integers(0, 2))
        layer: nn.Module = kind(channels, outputs, 3, stride, padding, groups=groups, bias=bias)
        return _parametrised(generator, layer)
    kernel = int(generator.choice([1, 3, 3, 2])) if not small else 1
    dilation = int(generator.choice([1, 1, 2])) if kernel == 3 and min(shape[1:]) >= 5 else 1
    stride = int(generator.choice([1, 1, 2])) if min(shape[1:]) >= 6 else 1
    padding = int(generator.integers(0, 2)) * (dilation * (kernel - 1) // 2 or 0)
    mode = str(generator.choice(["zeros", "zeros", "zeros", "circular", "reflect", "replicate"]))
    same: int | str = "same" if stride == 1 and _flip(generator, 0.2) else padding
    kind_of = nn.Conv1d if dimensions == 1 else nn.Conv2d
    layer = kind_of(
        channels, outputs, kernel, stride, same, dilation, groups, bias, padding_mode=mode
    )
    return _parametrised(generator, layer)


def _norm(generator: np.random.Generator, shape: Shape, *, sequence: bool = False) -> nn.Module:
    """Return a norm of any kind."""
    features = shape[-1] if sequence or len(shape) == 1 else shape[0]
    dimensions = len(shape) - 1
    affine = _flip(generator, 0.8)
    if sequence:
        kinds = ["layer", "layer", "own"]
    elif dimensions == 0:
        kinds = ["batch", "still", "layer", "own", "group"]
    else:
        kinds = ["batch", "batch", "batch", "still", "group", "instance", "running", "own", "layer"]
    kind = str(generator.choice(kinds))
    batch = [nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d][dimensions]
    instance = nn.InstanceNorm1d if dimensions == 1 else nn.InstanceNorm2d
    if kind == "batch":
        momentum = [0.1, 0.1, None][int(generator.integers(3))]
        return batch(features, affine=affine, momentum=momentum)
    if kind == "still":
        return batch(features, affine=affine, track_running_stats=False)
    if kind == "group":
        return nn.GroupNorm(2 if features % 2 == 0 else 1, features, affine=affine)
    if kind == "instance":
        return instance(features, affine=affine)
    if kind == "running":
        return instance(features, affine=affine, track_running_stats=True)
    if kind == "own":
        return OwnNorm(features, -1 if sequence or dimensions == 0 else 1)
    return nn.LayerNorm(shape[-1:] if sequence else shape, elementwise_affine=affine)


def _activation(generator: np.random.Generator) -> nn.Module:
    choices: list[Callable[[], nn.Module]] = [
        nn.ReLU, lambda: nn.ReLU(inplace=True), nn.ReLU6, nn.GELU, nn.SiLU, nn.Tanh,
        lambda: nn.Hardswish(inplace=True), nn.Hardswish, lambda: nn.LeakyReLU(0.1, inplace=True),
        lambda: Apply(functional.relu), lambda: Apply(lambda x: (x + 0.1).relu_()),
        lambda: Apply(lambda x: x * torch.sigmoid(x)), nn.PReLU, lambda: nn.ReLU6(inplace=True),
    ]  # fmt: skip
    return choices[int(generator.integers(len(choices)))]()


def _pooling(generator: np.random.Generator, shape: Shape) -> nn.Module:
    ceil = _flip(generator)
    one = len(shape) == 2
    kind = [
        nn.MaxPool1d if one else nn.MaxPool2d,
        nn.AvgPool1d if one else nn.AvgPool2d,
    ][int(generator.integers(2))]
    kernel, stride = [(2, 2), (3, 2), (3, 1), (2, 1)][int(generator.integers(4))]
    if min(shape[1:]) < 4:
        kernel, stride = 2, 1
    return kind(kernel, stride, padding=int(kernel == 3 and _flip(generator)), ceil_mode=ceil)


def _same_convolution(generator: np.random.Generator, shape: Shape) -> nn.Module:
    kind = nn.Conv1d if len(shape) == 2 else nn.Conv2d
    channels = shape[0]
    groups = int(generator.choice([1, 1, channels]))
    layer = kind(channels, channels, 3, padding=1, groups=groups, bias=_flip(generator))
    return _parametrised(generator, layer)


def _alike(generator: np.random.Generator, shape: Shape, sequence: bool, depth: int) -> nn.Module:
    """Return layers that keep the shape."""
    chosen = generator.random()
    core: nn.Module
    if sequence or len(shape) == 1:
        features = shape[-1]
        if sequence and chosen < 0.25:
            core = SelfAttention(features, token=_flip(generator), own=_flip(generator))
        elif sequence and chosen < 0.5:
            kind = str(generator.choice(["gru", "lstm", "rnn"]))
            layers = int(generator.integers(1, 3))
            core = Recurrent(kind, features, layers, features % 2 == 0 and _flip(generator, 0.3))
        elif sequence and chosen < 0.55:
            core = Cell(features)
        elif chosen < 0.7:
            core = Tied(features, _flip(generator))
        else:
            core = _parametrised(generator, nn.Linear(features, features, bias=_flip(generator)))
    else:
        core = _same_convolution(generator, shape)
    layers_ = [core]
    if _flip(generator):
        layers_.append(_norm(generator, shape, sequence=sequence))
    activation = _activation(generator)
    # What torch's recurrent layers put out must not be written, with some settings of flags.
    writes = len(layers_) == 1 and isinstance(core, Recurrent | Cell | SelfAttention)
    if _flip(generator, 0.6) and not (writes and getattr(activation, "inplace", False)):
        layers_.append(activation)
    if depth > 0:
        layers_.append(_joined(generator, shape, sequence, depth - 1))
    return nn.Sequential(*layers_)


def _joined(generator: np.random.Generator, shape: Shape, sequence: bool, depth: int) -> nn.Module:
    """Return layers that keep the shape, joined in some way."""

    def inner() -> nn.Module:
        return _alike(generator, shape, sequence, depth)

    channel = shape[-1] if sequence else shape[0]
    chosen = str(generator.choice(
        ["residual", "residual", "halves", "twice", "experts", "scaled", "plain", "plain"]
    ))  # fmt: skip
    if chosen == "residual":
        return Residual(inner(), str(generator.choice(["", "relu", "relu_"])))
    if chosen == "halves" and channel % 4 == 0:
        half = (*shape[:-1], channel // 2) if sequence else (channel // 2, *shape[1:])
        parts = [_alike(generator, half, sequence, 0) for _ in range(2)]
        return Halves(*parts, axis=-1 if sequence else 1)
    if chosen == "twice":
        return Twice(inner())
    if chosen == "experts":
        return Experts(inner(), inner())
    if chosen == "plain" and _flip(generator, 0.2):
        return LayerDrop(inner())
    if chosen == "scaled":
        axis = -1 if sequence else 1
        return nn.Sequential(Scaled(channel, axis), inner())
    return inner()


def _after(layer: nn.Module, shape: Shape) -> Shape:
    """Return the shape that a layer gives, tried on a copy's worth of zeros in eval mode."""
    training = layer.training
    layer.eval()
    with torch.no_grad():
        found = tuple(layer(torch.zeros(2, *shape)).shape[1:])
    layer.train(training)
    return found


def random_model(seed: int) -> RandomModel:
    """Return the model of this number; the global generator of torch is seeded by it too."""
    generator = np.random.default_rng(seed)
    torch.manual_seed(seed)
    while True:
        drawn = _drawn(generator)
        if _trains(drawn):
            torch.manual_seed(seed)
            return drawn


def _trains(drawn: RandomModel) -> bool:
    """Whether torch itself can train it: some write in place what an earlier layer still needs."""
    model = copy.deepcopy(drawn.model)
    try:
        for inputs, targets in drawn.batches:
            loss = functional.cross_entropy(model(inputs.clone()), targets)
            loss.backward()  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return bool(torch.isfinite(loss))


def _drawn(generator: np.random.Generator) -> RandomModel:
    start = str(generator.choice(["map", "map", "line", "sequence", "vector"]))
    shape = {"map": (3, 8, 8), "line": (4, 10), "sequence": (5, 8), "vector": (6,)}[start]
    given, sequence = shape, start == "sequence"
    layers: list[nn.Module] = []

    def add(layer: nn.Module) -> None:
        nonlocal shape
        shape = _after(layer, shape)
        layers.append(layer)

    if start == "vector":
        add(_parametrised(generator, nn.Linear(6, 8)))
    for _ in range(int(generator.integers(1, 4))):
        if sequence or len(shape) == 1:
            add(_joined(generator, shape, sequence, int(generator.integers(0, 2))))
            if _flip(generator, 0.4):
                add(nn.Linear(shape[-1], 8, bias=_flip(generator)))
        else:
            add(_convolution(generator, shape))
            if _flip(generator, 0.6) and int(np.prod(shape[1:])) > 1:
                add(_norm(generator, shape))
            if _flip(generator, 0.7):
                add(_activation(generator))
            if min(shape[1:]) >= 3 and _flip(generator, 0.3):
                add(_pooling(generator, shape))
            if _flip(generator, 0.5) and min(shape[1:]) > 1:
                add(_joined(generator, shape, False, int(generator.integers(0, 2))))
        if _flip(generator, 0.06):
            add(nn.Dropout(0.2))
        if _flip(generator, 0.06):
            add(FunctionalDropout())
    if len(shape) == 3 and _flip(generator, 0.2):
        add(nn.Flatten(2))
    if len(shape) == 2 and not sequence and shape[0] % 2 == 0 and _flip(generator, 0.3):
        add(Apply(lambda x: x.transpose(1, 2)))
        sequence = True
        add(_joined(generator, shape, True, 0))
    average = len(shape) > 1 and (_flip(generator, 0.7) or sequence)
    features = (shape[-1] if sequence else shape[0]) if average else int(np.prod(shape))
    head = nn.Linear(features, _CLASSES)
    other = nn.Linear(features, _CLASSES) if _flip(generator, 0.12) else None
    body = nn.Sequential(*layers)
    model = Whole(body, head, other, _flip(generator, 0.1), average)
    size = int(generator.integers(4, 9))
    batches = []
    for _ in range(int(generator.integers(5, 9))):
        targets = torch.randint(_CLASSES, (size,))
        batches.append((torch.randn(size, *given), targets))
    dropping = (nn.Dropout, FunctionalDropout, LayerDrop)
    is_random = any(isinstance(module, dropping) for module in model.modules())
    return RandomModel(model, batches, is_random)
