"""Pretrain the small language model on Python's own documentation: the base of what is adapted to other text."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fl_elastic.named_models import build_model
from fl_elastic.storage import write_atomically
from fl_elastic_simulations.data.files import cache_folder
from fl_elastic_simulations.data.plays import CHARACTERS, LENGTH, windows_of

__all__ = ["Recipe", "pretrained_file", "pretraining"]

_MODEL = "fl_elastic_simulations.models.language:language_model"
_TEST_SHARE = 0.05
_CLIP = 1.0


@dataclass(frozen=True)
class Recipe:
    """How the model is trained: AdamW, a rate that rises at first and then falls along a cosine to nothing.

    Parameters
    ----------
    steps, batch_size : int
        Windows of random places.
    learning_rate : float
        The highest one.
    warm_up : int
        Steps until it is reached.
    seed : int
        Of weights and places.
    """

    steps: int = 2000
    batch_size: int = 16
    learning_rate: float = 1e-3
    warm_up: int = 100
    seed: int = 0

    def rate(self, step: int) -> float:
        """Return the rate of a step as a share of the highest.

        >>> recipe = Recipe(steps=300, warm_up=100)
        >>> [round(recipe.rate(step), 2) for step in (0, 99, 200, 299)]
        [0.01, 1.0, 0.5, 0.0]
        """
        if step < self.warm_up:
            return (step + 1) / self.warm_up
        done = (step - self.warm_up) / max(self.steps - self.warm_up, 1)
        return float(0.5 * (1 + np.cos(np.pi * done)))


def pretrained_file(recipe: Recipe) -> Path:
    """Return where the weights of a recipe are kept: in the user's cache, by recipe and text."""
    kind = hashlib.blake2b(f"{recipe}{_text()}".encode(), digest_size=8).hexdigest()
    return cache_folder() / "pretrained" / f"language-{kind}.npz"


def pretraining(recipe: Recipe) -> dict[str, Any]:
    """Pretrain in one thread, and keep the weights; return what it took and how good the model is.

    Returns
    -------
    dict
        Characters of text, processor seconds, and loss and accuracy on the last twentieth of the text, on which it
        was not trained.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _pretraining(recipe)
    finally:
        torch.set_num_threads(threads)


def _pretraining(recipe: Recipe) -> dict[str, Any]:
    text = _text()
    split = int((1 - _TEST_SHARE) * len(text))
    codes = np.frombuffer(text[:split].encode("ascii", "replace"), np.uint8).astype(np.int64)
    model = build_model(_MODEL, (LENGTH,), CHARACTERS, recipe.seed).train()
    optimizer = torch.optim.AdamW(model.parameters(), recipe.learning_rate, weight_decay=0.1)
    generator = np.random.default_rng(recipe.seed)
    started = time.process_time()
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * recipe.rate(step)
        places = generator.integers(0, len(codes) - LENGTH, recipe.batch_size)
        rows = torch.from_numpy(codes[places[:, None] + np.arange(LENGTH + 1)])
        optimizer.zero_grad(set_to_none=True)
        functional.cross_entropy(model(rows[:, :-1]), rows[:, 1:]).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        optimizer.step()
    seconds = time.process_time() - started
    _save(model, pretrained_file(recipe))
    loss, accuracy = _tested(model, torch.from_numpy(windows_of(text[split:])))
    return {
        "characters": len(text), "cpu_seconds": round(seconds, 1), "loss": round(loss, 4),
        "accuracy": round(accuracy, 4), "parameters": sum(p.numel() for p in model.parameters()),
    }  # fmt: skip


def _text() -> str:
    return "\n\n".join(topics[name] for name in sorted(topics))


@torch.no_grad()
def _tested(model: nn.Module, windows: Tensor) -> tuple[float, float]:
    model.eval()
    scores = torch.cat([model(rows[:, :-1]) for rows in torch.split(windows, 32)])
    right = scores.argmax(1) == windows[:, 1:]
    return float(functional.cross_entropy(scores, windows[:, 1:])), float(right.float().mean())


def _save(model: nn.Module, path: Path) -> None:
    """Write the weights as an npz file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part.npz")
    np.savez(beside, **{name: each.numpy() for name, each in model.state_dict().items()})
    write_atomically(path, beside.read_bytes())
    beside.unlink()
