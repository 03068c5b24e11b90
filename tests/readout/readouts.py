"""Models to read from, and slow references for what is read."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fl_elastic.groups.batch import as_pair
from fl_elastic.groups.forward import call_model
from fl_elastic.losses import own_loss
from fl_elastic.readout.place import INPUT, Place
from fl_elastic.readout.poolings import pooling_for

Made = tuple[nn.Module, Any]
Odd = Callable[[], Made]


def of_zoo(module: str, name: str) -> Made:
    """Return a model of the zoo and inputs for it."""
    torch.manual_seed(0)
    subject = getattr(importlib.import_module(module), name)()
    given = subject.batches[0]
    if subject.loss_fn is own_loss:
        return subject.model, {key: each for key, each in given.items() if key != "labels"}
    return subject.model, as_pair(given)[0]


def hooked_features(model: nn.Module, places: tuple[Place, ...], inputs: Any) -> Tensor:
    """The features of the whole model in eval mode: what hooks see that copy before anything else is done."""
    found: dict[Place, Tensor] = {}
    handles = []
    for place in places:
        if place.module == INPUT:
            first = inputs
            while not isinstance(first, Tensor):
                first = next(iter(first.values() if isinstance(first, dict) else first))
            found[place] = first.clone()
            continue
        module = model.get_submodule(place.module)

        def keep(place: Place, tensor: Tensor) -> None:
            if place not in found:
                found[place] = tensor.clone()

        handles.append(
            module.register_forward_pre_hook(
                lambda _, args, kwargs, place=place: keep(place, [*args, *kwargs.values()][0]),
                with_kwargs=True,
                prepend=True,
            )
            if place.at_input
            else module.register_forward_hook(
                lambda _, __, output, place=place: keep(place, output)
            )
        )
    run_with(handles, model, inputs)
    tensors = [found[p] if found[p].is_floating_point() else found[p].float() for p in places]
    return torch.cat(
        [pooling_for(p, each)(each) for p, each in zip(places, tensors, strict=True)], dim=1
    )


def ran_before(model: nn.Module, place: Place, inputs: Any) -> list[str]:
    """The modules without modules in them that begin in the pass before it comes by the place, in order."""
    begun: list[str] = []
    until: list[int] = []
    handles = [
        module.register_forward_pre_hook(lambda *_, name=name: begun.append(name))
        for name, module in model.named_modules()
        if not list(module.children())
    ]
    at = model.get_submodule(place.module)
    note = lambda *_: until.append(len(begun))  # noqa: E731
    handles.append(
        at.register_forward_pre_hook(note, prepend=True)
        if place.at_input
        else at.register_forward_hook(note)
    )
    run_with(handles, model, inputs)
    return begun[: until[0]]


def run_with(handles: list[Any], model: nn.Module, inputs: Any) -> None:
    """A pass in eval mode with these hooks, and none of either afterwards."""
    modes = [(each, each.training) for each in model.modules()]
    model.eval()
    with torch.no_grad():
        call_model(model, inputs)
    for handle in handles:
        handle.remove()
    for each, mode in modes:
        each.training = mode


class Twice(nn.Module):
    """A module that runs two times, before and after the place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.again, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(torch.tanh(self.again(torch.tanh(self.again(self.stem(x))))))


class Tied(nn.Module):
    """A weight on both sides of the place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.first.weight
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.last(torch.relu(self.middle(torch.relu(self.first(x))))))


class Loose(nn.Module):
    """Parameters and buffers that no module has but the model itself, before and after the place."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(6)), nn.Parameter(torch.zeros(6))
        self.register_buffer("offset", torch.randn(6))
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        x = torch.relu(self.first(x * self.scale + self.offset))
        return self.head(torch.relu(self.second(x)) + self.shift)


class InPlace(nn.Module):
    """What is read is worked on in place afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        x = self.first(x).relu_()
        x = self.second(x).mul_(2).add_(1)
        return self.head(x.mean(dim=(2, 3)))


class Attends(nn.Module):
    """Attention, whose inner layer is used and not called."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.after, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        x = self.attention(x, x, x, need_weights=False)[0]
        return self.head(torch.relu(self.after(x)).mean(dim=1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.rnn, self.head = (
            nn.Linear(5, 6),
            nn.GRU(6, 7, batch_first=True),
            nn.Linear(7, 3),
        )

    def forward(self, x: Tensor) -> Any:
        return self.head(self.rnn(torch.tanh(self.stem(x)))[0][:, -1])


class Pair(nn.Module):
    """Two inputs, by position or by name."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.both = nn.Linear(4, 5), nn.Linear(3, 5), nn.Linear(5, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, one: Tensor, other: Tensor) -> Any:
        return self.head(torch.relu(self.both(torch.tanh(self.left(one) + self.right(other)))))


class Skips(nn.Module):
    """What stands before the place in the model runs after it, and does arithmetic on what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.late, self.early, self.head = nn.Linear(7, 3), nn.Linear(6, 6), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        x = torch.relu(self.early(x))
        x = torch.cat([x, x[:, :1]], dim=1)
        return self.head(self.late(x) * self.late.weight.sum())


class Remembers(nn.Module):
    """Holds what it has computed last, with its history, as for a map of what it looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.rest, self.head = nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 3)
        self(torch.randn(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.rest(torch.relu(self.stem(x)))
        return self.head(self.seen)


ODD: dict[str, tuple[Odd, tuple[str, ...]]] = {
    "remembers": (lambda: (Remembers(), torch.randn(4, 6)), ("input@flat", "stem@flat", "in:head@flat")),
    "run twice": (lambda: (Twice(), torch.randn(4, 6)), ("again@flat", "stem@flat", "in:again@flat")),
    "tied across": (lambda: (Tied(), torch.randn(4, 6)), ("first@flat", "middle@flat", "first@flat+middle@flat")),
    "loose parameters": (lambda: (Loose(), torch.randn(4, 6)), ("first@flat", "second@flat", "in:second@flat")),
    "in place": (
        lambda: (InPlace(), torch.randn(4, 1, 9, 9)),
        ("first@grid2", "second@grid1", "first@grid2+second@grid1", "input@grid4+first@flat"),
    ),
    "attention": (
        lambda: (Attends(), torch.randn(4, 9, 8)),
        ("in:attention@tokens3", "after@tokens1", "in:after@first"),
    ),
    "recurrent": (lambda: (Recurrent(), torch.randn(4, 11, 5)), ("stem@tokens1", "in:head@flat", "input@random64")),
    "two inputs": (lambda: (Pair(), (torch.randn(4, 4), torch.randn(4, 3))), ("both@flat", "left@flat+right@flat")),
    "two named inputs": (
        lambda: (Pair(), {"one": torch.randn(4, 4), "other": torch.randn(4, 3)}),
        ("both@flat", "input@flat+right@flat"),
    ),
    "late ones first": (lambda: (Skips(), torch.randn(4, 6)), ("early@flat", "in:late@flat")),
    "in double": (lambda: (Twice().double(), torch.randn(4, 6).double()), ("again@flat", "input@random32")),
}  # fmt: skip
