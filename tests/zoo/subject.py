"""What a row of the zoo is: a model as people bring it, its batches, and its loss as a plain loop writes it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fl_elastic.losses import own_loss

BATCHES = 3
_SIZE = 4


@dataclass(frozen=True)
class Subject:
    """A model, batches for it, and its loss in two ways.

    Attributes
    ----------
    model : nn.Module
        With random weights, in training mode.
    batches : list
        As the model's users give them.
    loss_fn : callable
        What the trainer is given.
    loss_of : callable
        Loss of a model on a batch without anything of the library: what a plain loop would write.
    """

    model: nn.Module
    batches: list[Any]
    loss_fn: Callable[[Any, Any], Tensor]
    loss_of: Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Attributes
    ----------
    name : str
        Of the model.
    make : callable
        Builds it; the same weights for the same seed of torch.
    tuned : str
        Why `fine_tune` refuses it, as a pattern; empty where it works.
    """

    name: str
    make: Callable[[], Subject]
    tuned: str


def cases_in(module: Any, refused: dict[str, str]) -> list[Case]:
    """Return a case of every public function that the module defines, in its order."""
    functions = {
        name: each
        for name, each in vars(module).items()
        if inspect.isfunction(each)
        and each.__module__ == module.__name__
        and not name.startswith("_")
    }
    assert set(refused) <= set(functions), sorted(set(refused) - set(functions))
    return [Case(name, each, refused.get(name, "")) for name, each in functions.items()]


def drawn(make: Callable[[torch.Generator], Any]) -> list[Any]:
    """Return batches that a function draws from generators of their own."""
    return [make(torch.Generator().manual_seed(seed)) for seed in range(BATCHES)]


def classes(generator: torch.Generator, count: int = 3, *shape: int) -> Tensor:
    """Return labels, as many as a batch has examples."""
    return torch.randint(count, (_SIZE, *shape), generator=generator)


def with_own_loss(model: nn.Module, make: Callable[[torch.Generator], Any]) -> Subject:
    """Return a model of transformers, which computes its loss from the labels in its batches."""
    return Subject(model.train(), drawn(make), own_loss, lambda net, batch: net(**batch).loss)


def pairs(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    make: Callable[[torch.Generator], tuple[Any, Any]],
) -> Subject:
    """Return a model of which a loss function compares outputs with targets."""

    def loss_of(net: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        return loss_fn(net(**inputs) if isinstance(inputs, dict) else net(inputs), targets)

    return Subject(model.train(), drawn(make), loss_fn, loss_of)
