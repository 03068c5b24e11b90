"""Small streams whose truth is known, and learners for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.state.codec import to_archive
from fl_elastic.streaming import SampleStore, StreamLearner
from fl_elastic.streaming.guard import RecentSamples
from fl_elastic.streaming.store.changes import Relabelled
from fl_elastic.streaming.stream_options import StreamOptions, Trigger
from fl_elastic.training import Timing, TrainerOptions

Sample = tuple[NDArray[np.float32], int]
CENTRES = np.random.default_rng(7).normal(size=(8, 6)).astype(np.float32) * 3


def blobs(
    count: int, labels: Iterable[int] = (0, 1, 2), seed: int = 0, turn: int = 0
) -> list[Sample]:
    """Vectors around one centre per label; with another ``turn`` each label has another centre."""
    generator, known = np.random.default_rng(seed), list(labels)
    stream = []
    for _ in range(count):
        label = known[generator.integers(len(known))]
        noise = generator.normal(size=6).astype(np.float32)
        stream.append((CENTRES[(label + turn) % len(CENTRES)] + noise, label))
    return stream


def net(outputs: int = 3, dropout: float = 0.0, seed: int = 0) -> nn.Sequential:
    """Three linear layers, perhaps with dropout."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), nn.Dropout(dropout),
        nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, outputs),
    )  # fmt: skip


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Quick on toy streams."""
    return torch.optim.Adam(parameters, lr=0.02)


def learner_in(
    folder: Path,
    model: nn.Module | None = None,
    *,
    capacity: int = 2**20,
    encoding: str = "raw",
    steps: int = 10,
    save_every: int = 0,
    most_classes: int = 1000,
    **settings: Any,
) -> StreamLearner:
    """A learner in a folder that looks at no clock; its store is closed by `closed`."""
    given: dict[str, Any] = {
        "budget": Budget(),
        "policy": "full",
        "optimizer_fn": adam,
        "detector": "none",
        "trigger": Trigger(50, 20),
        "options": StreamOptions(
            steps=steps, save_every=save_every, most_classes=most_classes,
            training=TrainerOptions(timing=Timing(closed_loop=False)),
        ),
    }  # fmt: skip
    store = SampleStore(folder / "samples.db", capacity, encoding=encoding)
    return StreamLearner(model or net(), store, state_dir=folder, **{**given, **settings})


def closed(learner: StreamLearner) -> None:
    """Close it and its store."""
    learner.close()
    learner.store.close()


def run(learner: StreamLearner, stream: Iterable[Sample]) -> list[Any]:
    """What the learner says of each sample."""
    return [learner.observe(x, y) for x, y in stream]


def relabelled(store: SampleStore, number: int, y: int) -> bool:
    """Give a stored sample another label; return whether it is there."""
    return store.change([Relabelled(int(number), y)])[0] is not None


def delete_class(store: SampleStore, label: int | None) -> int:
    """Delete all samples of a class, return how many."""
    found = store.take(store.ids(labelled=False))
    return store.delete(
        [i for i, y in zip(found.ids.tolist(), found.y.tolist(), strict=True) if y == label]
    )


def weights(learner: StreamLearner) -> dict[str, NDArray[Any]]:
    """Copies of the model's tensors."""
    return {n: t.detach().cpu().numpy().copy() for n, t in learner.model.state_dict().items()}


def same(first: dict[str, NDArray[Any]], second: dict[str, NDArray[Any]]) -> bool:
    """Whether both have the same tensors, bit for bit."""
    return first.keys() == second.keys() and all(
        np.array_equal(first[name], second[name]) for name in first
    )


def samples_of(state: RecentSamples) -> dict[str, NDArray[Any]]:
    """Samples of a learner's memory as arrays: those to be trained on, and those held out."""
    found: dict[str, NDArray[Any]] = {
        "counted": np.array(state.counted),
        "waiting": np.array([*state.waiting], np.int64),
        "said": np.array([-7 if said is None else said for said in state.waiting.values()]),
    }
    for name, rows in {"new": state.new, "held": state.held_out}.items():
        found |= {
            f"{name}.x": np.array([row.x for row in rows]),
            f"{name}.y": np.array([row.y for row in rows], np.int64),
            f"{name}.n": np.array([row.number for row in rows], np.int64),
        }
    return found


def in_memory(learner: StreamLearner) -> dict[str, NDArray[Any]]:
    """`samples_of` a learner."""
    return samples_of(learner._memory.recent)


def learner_state(learner: StreamLearner) -> Iterator[Any]:
    """Everything that two learners which do the same have in common."""
    yield weights(learner)
    yield to_archive(learner.progress).facts
    yield to_archive(learner.rule.to_state()).facts
    yield learner.classes
    yield sorted(learner.store.sample(10**6, labelled=False).ids.tolist())
