"""Pretrain small models for which no weights are available: the recipe and the data."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from fl_elastic.groups import Batch
from fl_elastic.named_models import build_model
from fl_elastic.state.files import write_atomically
from fl_elastic_simulations.data.datasets import load_dataset
from fl_elastic_simulations.data.files import cache_folder
from fl_elastic_simulations.data.plays import CHARACTERS, LENGTH, windows_of

__all__ = ["Lessons", "Recipe", "of_documentation", "of_images", "pretrained_file", "pretraining"]

_MODEL = "fl_elastic_simulations.models.language:language_model"
_TEST_SHARE = 0.05
_CLIP = 1.0
_TESTED = 32


@dataclass(frozen=True)
class Recipe:
    """How the model is trained: AdamW, with a learning rate that rises first and then falls to zero along a cosine.

    Parameters
    ----------
    steps, batch_size : int
        Number of batches, and of random text positions or images per batch.
    learning_rate : float
        Highest learning rate.
    warm_up : int
        Number of steps until it is reached.
    seed : int
        Seed of weights and positions.
    """

    steps: int = 2000
    batch_size: int = 16
    learning_rate: float = 1e-3
    warm_up: int = 100
    seed: int = 0

    def rate(self, step: int) -> float:
        """Return the learning rate of a step as a share of the highest.

        >>> recipe = Recipe(steps=300, warm_up=100)
        >>> [round(recipe.rate(step), 2) for step in (0, 99, 200, 299)]
        [0.01, 1.0, 0.5, 0.0]
        """
        if step < self.warm_up:
            return (step + 1) / self.warm_up
        done = (step - self.warm_up) / max(self.steps - self.warm_up, 1)
        return float(0.5 * (1 + np.cos(np.pi * done)))


@dataclass(frozen=True)
class Lessons:
    """Data on which a model is pretrained.

    Attributes
    ----------
    model : callable
        ``model(seed)`` returns the model with random weights.
    draw : callable
        ``draw(generator, count)`` returns a batch of ``count`` examples.
    tested : list of batch
        Test examples, which are never drawn.
    left : str
        Prefix of the names of tensors that are not kept, such as those of a head; empty if all are kept.
    size : mapping of str to int
        Amount of data, for the table.
    """

    model: Callable[[int], nn.Module]
    draw: Callable[[np.random.Generator, int], Batch]
    tested: list[Batch]
    left: str = ""
    size: Mapping[str, int] = field(default_factory=dict)


def of_documentation() -> Lessons:
    """Return the prediction of next characters in Python's documentation, for the small language model.

    The last twentieth of the text is for testing.
    """
    text = _text()
    split = int((1 - _TEST_SHARE) * len(text))
    codes = np.frombuffer(text[:split].encode("ascii", "replace"), np.uint8).astype(np.int64)

    def draw(generator: np.random.Generator, count: int) -> Batch:
        places = generator.integers(0, len(codes) - LENGTH, count)
        rows = torch.from_numpy(codes[places[:, None] + np.arange(LENGTH + 1)])
        return rows[:, :-1], rows[:, 1:]

    windows = torch.from_numpy(windows_of(text[split:]))
    return Lessons(
        lambda seed: build_model(_MODEL, (LENGTH,), CHARACTERS, seed),
        draw,
        [(rows[:, :-1], rows[:, 1:]) for rows in torch.split(windows, _TESTED)],
        size={"characters": len(text)},
    )


def of_images(
    model: Callable[[int, int], nn.Module],
    dataset: str,
    root: str,
    *,
    left: str,
    tested: int = 1000,
) -> Lessons:
    """Return the classification of a dataset's images, for a model whose head is not kept.

    Parameters
    ----------
    model : callable
        ``model(classes, seed)`` returns the model with random weights.
    dataset, root : str
        See `fl_elastic_simulations.data.datasets.load_dataset`.
    left : str
        Prefix of the names of the head's tensors.
    tested : int
        Number of test images to use.
    """
    data = load_dataset(dataset, root)
    inputs, classes = torch.from_numpy(data.train_x), torch.from_numpy(data.train_y)

    def draw(generator: np.random.Generator, count: int) -> Batch:
        rows = torch.from_numpy(generator.integers(0, len(inputs), count))
        return inputs[rows], classes[rows]

    test = (torch.from_numpy(each[:tested]) for each in (data.test_x, data.test_y))
    return Lessons(
        lambda seed: model(data.classes, seed),
        draw,
        list(zip(*(torch.split(each, _TESTED) for each in test), strict=True)),
        left,
        {"images": len(inputs)},
    )


def pretrained_file(recipe: Recipe, name: str) -> Path:
    """Return the file of a recipe's model in the user's cache, named by its use, the recipe and Python's text."""
    kind = hashlib.blake2b(f"{recipe}{_text()}".encode(), digest_size=8).hexdigest()
    return cache_folder() / "pretrained" / f"{name}-{kind}.npz"


def pretraining(recipe: Recipe, lessons: Lessons, path: Path) -> dict[str, Any]:
    """Pretrain in one thread, and keep the weights; return the costs and the quality of the model.

    Parameters
    ----------
    recipe : Recipe
        How it is trained.
    lessons : Lessons
        On what it is trained.
    path : Path
        The npz file of the weights.

    Returns
    -------
    dict
        Size of the data, CPU seconds, loss and accuracy on test examples, and number of parameters.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _pretraining(recipe, lessons, path)
    finally:
        torch.set_num_threads(threads)


def _pretraining(recipe: Recipe, lessons: Lessons, path: Path) -> dict[str, Any]:
    model = lessons.model(recipe.seed).train()
    optimizer = torch.optim.AdamW(model.parameters(), recipe.learning_rate, weight_decay=0.1)
    generator = np.random.default_rng(recipe.seed)
    started = time.process_time()
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * recipe.rate(step)
        inputs, targets = lessons.draw(generator, recipe.batch_size)
        optimizer.zero_grad(set_to_none=True)
        functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        optimizer.step()
    seconds = time.process_time() - started
    _save(model, path, lessons.left)
    loss, accuracy = _tested(model, lessons.tested)
    return {
        **lessons.size, "cpu_seconds": round(seconds, 1), "loss": round(loss, 4),
        "accuracy": round(accuracy, 4), "parameters": sum(p.numel() for p in model.parameters()),
    }  # fmt: skip


def _text() -> str:
    return "\n\n".join(topics[name] for name in sorted(topics))


@torch.no_grad()
def _tested(model: nn.Module, batches: list[Batch]) -> tuple[float, float]:
    model.eval()
    scores = torch.cat([model(inputs) for inputs, _ in batches])
    targets = torch.cat([each for _, each in batches])
    right = scores.argmax(1) == targets
    return float(functional.cross_entropy(scores, targets)), float(right.float().mean())


def _save(model: nn.Module, path: Path, left: str) -> None:
    """Write the weights as an npz file, completely or not at all."""
    kept = {
        name: each.numpy()
        for name, each in model.state_dict().items()
        if not left or not name.startswith(left)
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part.npz")
    np.savez(beside, **kept)
    write_atomically(path, beside.read_bytes())
    beside.unlink()
