"""Train the network of learned channel scores on subsets of a public set, so that devices need no Fisher pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import huber_loss, interpolate

from fl_elastic.groups import Batch, LossFn, tensor_groups
from fl_elastic.groups.trace import trace_step
from fl_elastic.groups.untouched import untouched
from fl_elastic.losses import classification_loss, prototype_loss
from fl_elastic.methods.learned_selector.importance import SelectorNetwork
from fl_elastic.methods.learned_selector.set_summary import FEATURES, LayerSummary, summarise
from fl_elastic.planning.importance import Probe
from fl_elastic.planning.importance.channel_scores import FisherChannels
from fl_elastic.planning.importance.channels import ChannelScores
from fl_elastic.training.head_sums import solve_head
from fl_elastic_simulations.data.datasets import Dataset
from fl_elastic_simulations.data.episodes import augmented

__all__ = ["PseudoTask", "Seen", "pseudo_tasks", "seen_on", "train_selector"]

_FLOOR = 1e-4
_ROWS = 4096


@dataclass(frozen=True, eq=False)
class PseudoTask:
    """A subset of a public set as if it were a device's own.

    Attributes
    ----------
    batch : batch
        Whose potentials are wanted; by prototypes, of support images and changed ones.
    rest : tuple of Tensor
        Inputs and classes to solve for a head on.
    prototypes : bool
        Whether the loss is that of prototypes, without a head.
    """

    batch: Batch
    rest: tuple[Tensor, Tensor]
    prototypes: bool


@dataclass(frozen=True, eq=False)
class Seen:
    """What a selector is shown of one task, a row per channel, and what it is to say.

    Attributes
    ----------
    rows : array, shape (n, F)
        Summaries.
    potentials : array, shape (n,)
        Logarithms of Fisher potentials less their mean over the task.
    weights : array, shape (n,)
        By which rows count: each side of each layer alike.
    """

    rows: NDArray[np.float64]
    potentials: NDArray[np.float64]
    weights: NDArray[np.float64]


def pseudo_tasks(
    data: Dataset, count: int, sizes: Sequence[int], seed: int = 0, examples: int = 32
) -> Iterable[PseudoTask]:
    """Yield tasks of 2 to 10 random classes of a set of images, in the sizes by turns.

    Every second one is learned by prototypes. Images of one channel are given three.
    """
    generator = np.random.default_rng(seed)
    torch_generator = torch.Generator().manual_seed(seed)
    labels = data.labels
    for number in range(count):
        ways = int(generator.integers(2, min(10, data.classes) + 1))
        chosen = generator.choice(data.classes, ways, replace=False)
        places = np.flatnonzero(np.isin(labels, chosen))
        places = generator.permutation(places)[: 5 * examples]
        classes = torch.from_numpy(np.unique(labels[places], return_inverse=True)[1])
        size = sizes[number % len(sizes)]
        images = torch.from_numpy(data.train_x[places])
        if images.shape[1] == 1:
            images = images.expand(-1, 3, -1, -1)
        images = interpolate(images, (size, size), mode="bilinear", antialias=True)
        prototypes = number % 2 == 1
        some = images[:examples]
        if prototypes:
            classes = torch.from_numpy(np.unique(classes[:examples], return_inverse=True)[1])
            some = torch.cat([some, augmented(some, torch_generator)])
        yield PseudoTask((some, classes[:examples]), (images, classes), prototypes)


def seen_on(model: nn.Module, head: str, task: PseudoTask) -> Seen:
    """Return summaries and Fisher potentials of one task, with a head for it in a copy of the model, or none."""
    model = _with_head(model, head, task)
    loss_fn: LossFn = prototype_loss if task.prototypes else classification_loss
    with untouched(model):
        graph = trace_step(model, loss_fn, task.batch).graph
    groups = tensor_groups(model, loss_fn, task.batch)
    probe = Probe(model, loss_fn, groups, [task.batch], torch.optim.SGD, np.random.default_rng(0))
    return _together(summarise(probe, graph), FisherChannels().score(probe, graph))


def train_selector(
    tasks: Sequence[Seen],
    *,
    steps: int = 3000,
    width: int = 48,
    seed: int = 0,
    tell: Callable[[str], None] = print,
) -> SelectorNetwork:
    """Return a network that says what Fisher potentials are, trained by Adam on rows of all tasks."""
    rows, wanted, weights = (
        np.concatenate([getattr(task, name) for task in tasks])
        for name in ("rows", "potentials", "weights")
    )
    centre, scale = rows.mean(0), rows.std(0) + 1e-3
    x = torch.from_numpy(((rows - centre) / scale).clip(-5, 5)).float()
    y, chances = torch.from_numpy(wanted).float(), weights / weights.sum()
    generator = np.random.default_rng(seed)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        network = nn.Sequential(
            nn.Linear(len(FEATURES), width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )  # fmt: skip
    optimizer = torch.optim.Adam(network.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    cumulated = chances.cumsum()
    for step in range(steps):
        chosen = np.searchsorted(cumulated, generator.random(_ROWS)).clip(max=len(x) - 1)
        places = torch.from_numpy(chosen)
        optimizer.zero_grad(set_to_none=True)
        loss = huber_loss(network(x[places])[:, 0], y[places])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if (step + 1) % 1000 == 0:
            tell(f"step {step + 1} of {steps}: loss {loss.item():.4f}")
    layers = [each for each in network if isinstance(each, nn.Linear)]
    return SelectorNetwork(
        centre,
        scale,
        [layer.weight.detach().double().numpy() for layer in layers],
        [layer.bias.detach().double().numpy() for layer in layers],
    )


def _with_head(model: nn.Module, head: str, task: PseudoTask) -> nn.Module:
    """Return the model with the head of a task: solved for in closed form, or none."""
    model = deepcopy(model).train()
    parent, _, name = head.rpartition(".")
    place = model.get_submodule(parent)
    old = place.get_submodule(name)
    if task.prototypes:
        setattr(place, name, nn.Identity())
        return model
    assert isinstance(old, nn.Linear)
    inputs, classes = task.rest
    setattr(place, name, nn.Linear(old.in_features, int(classes.max()) + 1))
    solve_head(model, list(zip(torch.split(inputs, 64), torch.split(classes, 64), strict=True)))
    return model


def _together(summary: Mapping[str, LayerSummary], found: Mapping[str, ChannelScores]) -> Seen:
    rows, wanted, weights = [], [], []
    for name, layer in summary.items():
        for side, scores in (
            (layer.inputs, found[name].inputs),
            (layer.outputs, found[name].outputs),
        ):
            if scores is not None and (scores > 0).any():
                floor = _FLOOR * float(np.median(scores[scores > 0]))
                rows.append(side)
                wanted.append(np.log10(scores.clip(min=floor)))
                weights.append(np.full(len(side), 1 / len(side)))
    potentials = np.concatenate(wanted)
    return Seen(np.concatenate(rows), potentials - potentials.mean(), np.concatenate(weights))
