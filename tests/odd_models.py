"""Models and batches of which nothing is as it is in most examples, and a loop by hand that trains them.

Every model ends in a linear layer of three classes. What stands before it takes sequences with time first, packed
or ragged ones, bags of words, graphs or named tensors, holds a state between batches, has a target that follows,
or writes its state under other names than its parameters have.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader

INPUTS = ("rows", "time first", "packed", "bags", "ragged", "graphs", "named")
STATES = ("plain", "checkpointed", "renamed", "extra")
HELD = ("nothing", "attribute", "target")
_WIDTH = 8


@dataclass(frozen=True)
class Kind:
    """What a model takes, how it writes its state, and what it changes by itself."""

    inputs: str = "rows"
    state: str = "plain"
    held: str = "nothing"


@dataclass(frozen=True)
class Graphs:
    """A batch of graphs as an object, as libraries of graphs give them."""

    x: Tensor
    graph: Tensor
    num_graphs: int

    def to(self, device: Any) -> Graphs:
        return replace(self, x=self.x.to(device), graph=self.graph.to(device))


class Net(nn.Module):
    """An encoder of the inputs, a hidden layer, a head."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        if kind.inputs in ("time first", "packed"):
            self.encoder: nn.Module = nn.LSTM(5, _WIDTH)
        elif kind.inputs == "bags":
            self.encoder = nn.EmbeddingBag(11, _WIDTH)
        else:
            self.encoder = nn.Linear(5, _WIDTH)
        self.hidden: nn.Module = nn.Linear(_WIDTH, _WIDTH)
        if kind.held == "target":
            self.target = nn.Linear(_WIDTH, _WIDTH).requires_grad_(False)
        self.seen: Any = None
        self.head = nn.Linear(_WIDTH, 3)
        if kind.state == "checkpointed":
            self.hidden = checkpoint_wrapper(
                self.hidden, checkpoint_impl=CheckpointImpl.NO_REENTRANT
            )  # type: ignore[no-untyped-call]

    def forward(self, inputs: Any, offsets: Any = None, edges: Any = None) -> Tensor:
        features = torch.tanh(self._encoded(inputs, offsets))
        if edges is not None:
            features = features + 0.1 * edges.float().mean()
        if self.kind.held == "attribute":
            if self.seen is not None:
                features = features + self.seen
            self.seen = features.detach().mean(0, keepdim=True)
        found = torch.relu(self.hidden(features))
        if self.kind.held == "target":
            with torch.no_grad():
                inner = getattr(self.hidden, "_checkpoint_wrapped_module", self.hidden)
                pairs = zip(self.target.parameters(), inner.parameters(), strict=True)
                for slow, fast in pairs if self.training else ():
                    slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
            found = found + 0.1 * self.target(features)
        scores: Tensor = self.head(found)
        return scores

    def _encoded(self, inputs: Any, offsets: Any) -> Tensor:
        kind = self.kind.inputs
        if kind == "time first":
            found: Tensor = self.encoder(inputs)[0][-1]
        elif kind == "packed":
            states = self.encoder(inputs)[1][0]
            found = states[-1]
        elif kind == "bags":
            found = self.encoder(inputs, offsets)
        elif kind == "ragged":
            found = torch.stack([self.encoder(each).mean(0) for each in inputs])
        elif kind == "graphs":
            nodes = self.encoder(inputs.x)
            empty = nodes.new_zeros(inputs.num_graphs, _WIDTH)
            found = empty.index_add(0, inputs.graph, nodes)
        else:
            found = self.encoder(inputs)
        return found

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        found = super().state_dict(*arguments, **options)
        if self.kind.state != "renamed":
            return found
        return {f"net.{name}": each for name, each in found.items()}

    def load_state_dict(self, state: Any, *arguments: Any, **options: Any) -> Any:
        if self.kind.state == "renamed":
            state = {name.removeprefix("net."): each for name, each in state.items()}
        return super().load_state_dict(state, *arguments, **options)

    def get_extra_state(self) -> Any:
        if self.kind.state != "extra":
            raise RuntimeError("there is none")
        return {"classes": 3}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"classes": 3}


class _Plain(Net):
    """Without extra state: torch asks a class whether it has some."""

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state


def net_of(kind: Kind, seed: int) -> nn.Module:
    """Return the model with the weights of a seed."""
    torch.manual_seed(seed)
    return Net(kind) if kind.state == "extra" else _Plain(kind)


def batch_of(kind: Kind, count: int, generator: torch.Generator) -> Any:
    """Return a batch of so many examples, in the form in which a loader gives it."""

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def lengths() -> list[int]:
        return torch.randint(1, 7, (count,), generator=generator).tolist()

    targets = torch.randint(3, (count,), generator=generator)
    if kind.inputs == "time first":
        return numbers(6, count, 5), targets
    if kind.inputs == "packed":
        if not count:
            return torch.zeros(0, 5), targets
        return pack_sequence([numbers(n, 5) for n in lengths()], enforce_sorted=False), targets
    if kind.inputs == "bags":
        sizes = lengths()
        words = torch.randint(11, (sum(sizes),), generator=generator)
        starts = torch.tensor([0, *sizes], dtype=torch.long).cumsum(0)[:count]
        return (words, starts), targets
    if kind.inputs == "ragged":
        # As many rows as there are examples, in each, would make them inputs of all examples.
        return [numbers(n + 6, 5) for n in lengths()], targets
    if kind.inputs == "graphs":
        sizes = torch.tensor(lengths(), dtype=torch.long)
        graph = torch.arange(count).repeat_interleave(sizes)
        return Graphs(numbers(len(graph), 5), graph, count), targets
    if kind.inputs == "named":
        return {"edges": torch.ones(2, 9), "inputs": numbers(count, 5), "label": targets}
    return numbers(count, 5), targets


def targets_of(batch: Any) -> Tensor:
    """Return the targets of a batch."""
    found: Tensor = batch["label"] if isinstance(batch, dict) else batch[1]
    return found


def is_empty(batch: Any) -> bool:
    """Whether a batch has no example."""
    return len(targets_of(batch)) == 0


def scores_of(model: nn.Module, batch: Any) -> Tensor:
    """Call a model on a batch, as who wrote both would."""
    if isinstance(batch, dict):
        found: Tensor = model(batch["inputs"], edges=batch["edges"])
    elif type(batch[0]) in (tuple, list) and not batch[0][0].is_floating_point():
        found = model(*batch[0])
    else:
        found = model(batch[0])
    return found


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean cross-entropy of a model on a batch."""
    return cross_entropy(scores_of(model, batch), targets_of(batch))


class _WithLength:
    """A loader that is no list, and says its length alone."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


class _WithoutLength:
    """A loader that can be read again and again, and says nothing."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


LOADERS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "with length": _WithLength,
    "without length": _WithoutLength,
    "torch": lambda batches: DataLoader(batches, batch_size=None),  # type: ignore[arg-type]
}


def loader_of(name: str, batches: list[Any]) -> Any:
    """Return a loader of a kind that gives these batches."""
    return LOADERS[name](batches)


def drawn_kind(rng: random.Random) -> Kind:
    """Return a kind of model by chance."""
    return Kind(rng.choice(INPUTS), rng.choice(STATES), rng.choice(HELD))
