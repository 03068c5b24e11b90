"""Small models that each show one thing, and batches for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from trainer_settings import settings_of

from fl_elastic.budget import Budget
from fl_elastic.optimizers import OptimizerFn
from fl_elastic.planning import Needs, Plan, PlanRequest, Policy
from fl_elastic.profiling import CostProfile, estimate_profile
from fl_elastic.training import ElasticTrainer

Batch = tuple[Any, Any]

loss_fn = cross_entropy


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum and weight decay: what a stale gradient or state would move."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Adam with weight decay."""
    return torch.optim.Adam(parameters, lr=0.01, weight_decay=0.01)


def vectors(batches: int = 1, size: int = 8, features: int = 6, seed: int = 0) -> list[Batch]:
    """Batches of vectors of three classes."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, features, generator=generator),
            torch.randint(3, (size,), generator=generator),
        )
        for _ in range(batches)
    ]


def images(batches: int = 1, size: int = 6, seed: int = 0) -> list[Batch]:
    """Batches of 3 x 8 x 8 images of three classes."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, 3, 8, 8, generator=generator),
            torch.randint(3, (size,), generator=generator),
        )
        for _ in range(batches)
    ]


def chain() -> nn.Sequential:
    """Four linear layers."""
    return nn.Sequential(
        nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(),
        nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3),
    )  # fmt: skip


def used_twice() -> nn.Sequential:
    """A layer and its norm that run twice."""
    shared = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    return nn.Sequential(shared, nn.ReLU(), shared, nn.ReLU(), nn.Linear(6, 3))


def conv_net(norm: str = "batch") -> nn.Sequential:
    """Three convolutions with a norm each, then a linear head."""

    def layer(inputs: int, outputs: int) -> list[nn.Module]:
        made = {
            "batch": nn.BatchNorm2d(outputs),
            "group": nn.GroupNorm(2, outputs),
            "none": nn.Identity(),
        }[norm]
        return [nn.Conv2d(inputs, outputs, 3, padding=1), made, nn.ReLU()]

    return nn.Sequential(
        *layer(3, 4), *layer(4, 8), *layer(8, 8),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


class Residual(nn.Module):
    """A residual block whose short cut has its own projection."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.short = nn.Conv2d(3, 4, 1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Add the short cut."""
        y = self.second(torch.relu(self.first(x))) + self.short(x)
        out: Tensor = self.head(torch.relu(y).mean(dim=(2, 3)))
        return out


class SqueezeExcite(nn.Module):
    """An inverted residual with a depthwise convolution and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.norm = nn.Conv2d(3, 12, 1, bias=False), nn.BatchNorm2d(12)
        self.deep = nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.squeeze, self.excite = nn.Conv2d(12, 4, 1), nn.Conv2d(4, 12, 1)
        self.project, self.last = nn.Conv2d(12, 3, 1, bias=False), nn.BatchNorm2d(3)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Add the gated channels, projected, to the input."""
        inner = torch.relu(self.deep(torch.relu(self.norm(self.expand(x)))))
        gate = torch.sigmoid(
            self.excite(torch.relu(self.squeeze(inner.mean((2, 3), keepdim=True))))
        )
        out: Tensor = self.head((x + self.last(self.project(inner * gate))).mean((2, 3)))
        return out


class Inception(nn.Module):
    """Three parallel branches that are concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.one = nn.Conv2d(4, 2, 1)
        self.three = nn.Sequential(nn.Conv2d(4, 2, 1), nn.ReLU(), nn.Conv2d(2, 2, 3, padding=1))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(4, 2, 1))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Concatenate the branches."""
        x = torch.relu(self.stem(x))
        joined = torch.cat([self.one(x), self.three(x), self.pool(x)], dim=1)
        out: Tensor = self.head(joined.mean(dim=(2, 3)))
        return out


class TiedLinears(nn.Module):
    """Two linear layers that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Use the weight twice."""
        out: Tensor = self.head(torch.relu(self.second(torch.relu(self.first(x)))))
        return out


class TiedEmbedding(nn.Module):
    """A language model whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.middle = nn.Linear(4, 4)
        self.output = nn.Linear(4, 11, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores of the next token."""
        out: Tensor = self.output(torch.relu(self.middle(self.embedding(tokens))).mean(dim=1))
        return out


class Attention(nn.Module):
    """A transformer layer behind a learned token and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        self.positions = nn.Parameter(torch.zeros(1, 4, 8))
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Classify by the learned token."""
        y = self.embed(x.view(len(x), 1, -1)).expand(-1, 3, -1)
        y = torch.cat([self.token.expand(len(x), -1, -1), y], dim=1) + self.positions
        y = self.norm(y)
        y = y + self.attention(y, y, y, need_weights=False)[0]
        out: Tensor = self.head(y[:, 0])
        return out


class Heads(nn.Module):
    """Fused attention of four heads over three tokens, each projection a layer of its own.

    Parameters
    ----------
    heads : int
        As many as its code says; -1 for as many as come.
    """

    def __init__(self, heads: int = -1) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Linear(2, 8)
        self.query, self.value = nn.Linear(8, 16), nn.Linear(8, 16)
        # A bias of keys has a gradient of rounding errors alone.
        self.key = nn.Linear(8, 16, bias=False)
        self.out = nn.Linear(16, 8)
        self.mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Classify by the mean over the tokens."""
        y = self.embed(x.view(len(x), 3, 2))
        query, key, value = (
            layer(y).view(len(x), 3, self.heads, 4).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        seen = nn.functional.scaled_dot_product_attention(query, key, value)
        y = y + self.out(seen.transpose(1, 2).reshape(len(x), 3, -1))
        scores: Tensor = self.head((y + self.mlp(y)).mean(1))
        return scores


class Recurrent(nn.Module):
    """A two-layer LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 5, num_layers=2, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Classify by the last state."""
        states, _ = self.lstm(x.view(len(x), 3, 2))
        out: Tensor = self.head(states[:, -1])
        return out


class KeptInEval(nn.Module):
    """Computes a part of its weights once in eval mode, and anew in train mode, as LeViT does its biases."""

    def __init__(self, keeps: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.below, self.biases, self.head = nn.Linear(6, 8), nn.Linear(2, 8), nn.Linear(8, 3)
        self.keeps = keeps
        self.kept: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        """Classify."""
        bias = self.kept.get("bias")
        if bias is None:
            bias = torch.tanh(self.biases(x.new_ones(2)))
        if self.keeps and not self.training:
            self.kept["bias"] = bias
        out: Tensor = self.head(torch.relu(self.below(x)) + bias)
        return out

    def train(self, mode: bool = True) -> KeptInEval:
        """Forget what was computed."""
        super().train(mode)
        if mode:
            self.kept = {}
        return self


class Reiterable:
    """A loader that is neither a list nor sized, but can be read again and again."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all tensors of the model."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same_weights(before: dict[str, Tensor], model: nn.Module, names: Iterable[str] = ()) -> bool:
    """Whether tensors (all, or the named ones) are bit for bit as before."""
    now = model.state_dict()
    return all(torch.equal(before[name], now[name]) for name in names or before)


def flat_profile(model: nn.Module, batch: Batch, optimizer_fn: OptimizerFn = sgd) -> CostProfile:
    """A profile in which every node costs the same, so that plans do not depend on time.

    The forward pass takes 2 s, each node of the backward pass 1 s on the way and 1 s for its gradient.
    """
    # What does not depend on time an estimate knows too, and hundreds of tests ask.
    found = estimate_profile(model, loss_fn, batch, optimizer_fn=optimizer_fn, prefix=True)
    owner = np.array([node.group is not None for node in found.graph.nodes])
    ends = np.array([not node.inputs for node in found.graph.nodes])
    return replace(
        found,
        node_update_seconds=np.where(owner, 1.0, 0.0),
        node_path_seconds=np.where(ends, 0.0, 1.0),
        optimizer_seconds=np.zeros(len(found)),
        forward_seconds=np.full(len(found), 2.0),
        fixed_seconds=0.0,
        optimizer_bytes_per_weight=0.0,
        estimated=False,
    )


class Chosen(Policy):
    """Trains the groups it is told, one set per selection; the last set stays."""

    needs = Needs(importance=True)

    def __init__(self, *sets: Iterable[str]) -> None:
        self.sets = [set(names) for names in sets]

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan that trains the next set."""
        names = self.sets.pop(0) if len(self.sets) > 1 else self.sets[0]
        mask = np.array([name in names for name in request.profile.group_names])
        assert mask.sum() == len(names)
        return request.plan_of_mask("chosen", mask)


class AsTold(Chosen):
    """Trains what it is told, also where the budget leaves time for more."""

    needs_coverage = False


def trainer_of(
    model: nn.Module,
    batch: Batch,
    *sets: Iterable[str],
    optimizer_fn: OptimizerFn = sgd,
    budget: Budget | None = None,
    **options: Any,
) -> ElasticTrainer:
    """A trainer that trains the named groups whatever their cost, and looks at no clock."""
    settings: dict[str, Any] = {
        "closed_loop": False, "full_update_every": 0
    } | options  # fmt: skip
    trainer = ElasticTrainer(
        model,
        loss_fn,
        optimizer_fn,
        budget=budget or Budget(),
        profile=flat_profile(model, batch, optimizer_fn),
        **settings_of(**settings),
    )
    trainer.planner.policy = Chosen(*sets)
    return trainer


def elastic_trainer(
    model: nn.Module, batch: Batch, budget: Budget, **options: Any
) -> ElasticTrainer:
    """A trainer of the elastic policy that looks at no clock."""
    settings: dict[str, Any] = {
        "closed_loop": False, "full_update_every": 0
    } | options  # fmt: skip
    return ElasticTrainer(
        model,
        loss_fn,
        sgd,
        budget=budget,
        profile=flat_profile(model, batch),
        **settings_of(**settings),
    )


GRAPHS: dict[str, tuple[Callable[[], nn.Module], Callable[..., list[Batch]]]] = {
    "chain": (chain, vectors),
    "convolutions": (conv_net, images),
    "residual": (Residual, images),
}
"""Models of three kinds of graphs, and what makes batches for them."""
