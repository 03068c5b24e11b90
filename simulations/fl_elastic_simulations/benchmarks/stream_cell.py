"""Run one device through one stream, and measure what it learns, what it forgets, and the costs."""

from __future__ import annotations

import copy
import gc
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.closed_form.head_sums import HeadSums
from fl_elastic.groups import Batch
from fl_elastic.streaming import (
    ClosedForm,
    Latent,
    Observation,
    Replay,
    SampleStore,
    StreamLearner,
    StreamOptions,
    Trigger,
)
from fl_elastic.training.head_pass import head_sums
from fl_elastic.training.read_out import readout_of
from fl_elastic_simulations.benchmarks.benchmark import Row
from fl_elastic_simulations.benchmarks.stream_methods import METHODS, StreamMethod
from fl_elastic_simulations.benchmarks.stream_tasks import TASKS, Labelled, Stream, StreamTask
from fl_elastic_simulations.data.datasets import data_root_folder
from fl_elastic_simulations.unequal.resident import resident_bytes, set_back_peak

# Factor by which a sample's weight in the accuracy along the stream falls with each sample; share of the former
# accuracy at which the model counts as recovered.
_FADING, _BACK = 0.98, 0.95


class _Timed(StreamLearner):
    """A learner that counts the CPU seconds of its adaptations and their preparation, except saving state."""

    adapting_seconds = 0.0
    saving_seconds = 0.0

    def _adapt_or_save(self, seen: Observation, *, save: bool = False) -> Observation:
        """Adapt as usual, and count the time of what changed the model."""
        began = time.process_time() - self.saving_seconds
        said = super()._adapt_or_save(seen, save=save)
        if said.adapted or said.rolled_back:
            self.adapting_seconds += time.process_time() - self.saving_seconds - began
        return said

    def save(self) -> bool:
        """Save as usual, and count the time."""
        began = time.process_time()
        taken = super().save()
        self.saving_seconds += time.process_time() - began
        return taken


@cache
def _at_home(task: str, seed: int, root: Path) -> tuple[Stream, nn.Module, tuple[int, ...]]:
    """Return the stream, the model as trained at home, and the labels of its outputs."""
    kind = TASKS[task]
    stream = kind.read(root, seed)
    known = tuple(int(label) for label in np.unique(stream.before.y))
    model = kind.build(root, len(known), seed)
    _train(model, kind, stream.before, known, seed)
    return stream, model, known


def _train(
    model: nn.Module, kind: StreamTask, data: Labelled, known: Sequence[int], seed: int
) -> None:
    targets = torch.from_numpy(np.searchsorted(known, data.y))
    draw = np.random.default_rng(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model.train()
        for _ in range(kind.epochs):
            for rows in np.array_split(draw.permutation(len(data)), max(len(data) // 32, 1)):
                optimizer.zero_grad()
                outputs = model(kind.prepare(torch.from_numpy(data.x[rows])))
                torch.nn.functional.cross_entropy(outputs, targets[rows]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    model.eval()


def run_stream(task: str, method: str, seed: int, data_root: str | None) -> Row:
    """Run one device through one stream, with one thread, and return the measurements."""
    torch.set_num_threads(1)
    root = data_root_folder(data_root)
    stream, home, known = _at_home(task, seed, root)
    kind, how = TASKS[task], METHODS[method]
    if not how.at_home:
        home = kind.build(root, len(known), seed).eval()
    choosing = 0.0
    if how.read:
        began, batches = time.process_time(), _batches_at_home(kind, stream.before, known)
        home = readout_of(home, batches, how.read)[0]
        choosing = time.process_time() - began
    head = None
    if how.closed_form:
        head = ClosedForm(kind.remember, _home_sums(home, kind, stream.before, known))
    with (
        tempfile.TemporaryDirectory() as folder,
        SampleStore(
            Path(folder) / "samples.db", int(kind.capacity * how.store_share), policy="class_balanced",
            encoding="fp16" if how.closed_form else "int8" if how.latent else "raw", seed=seed,
        ) as store,
        _Timed(
            copy.deepcopy(home), store, budget=Budget(speedup=how.speedup),
            policy=how.policy or "full",
            optimizer_fn=lambda parameters: torch.optim.Adam(parameters, lr=kind.rate, fused=True),
            trigger=Trigger(kind.every) if how.policy else Trigger(None, None),
            replay=_replay(how, kind), state_dir=folder, seed=seed, classes=known,
            latent=Latent(kind.latent) if how.latent else None, head=head, prepare=kind.prepare,
            options=StreamOptions(steps=kind.latent_steps if how.latent else kind.steps, history=10_000),
        ) as learner,
    ):  # fmt: skip
        gc.collect()
        set_back_peak()
        before = resident_bytes("VmRSS")
        went = _sent(learner, kind, stream)
        done = learner.adaptations
        return {
            "samples": len(went.correct),
            "prequential": float(np.mean(went.correct)),
            **_over_tasks(went.table),
            "recovery": _mean_recovery(np.array(went.correct), stream.starts[1:]),
            # CPU seconds of one thread, of whole adaptations and of the work between them. Choosing where to read
            # is part of adapting.
            "adapting_seconds": learner.adapting_seconds + choosing,
            "choosing_seconds": choosing,
            "saving_seconds": learner.saving_seconds,
            "other_seconds": went.seconds - learner.adapting_seconds,
            "selection_seconds": sum(each.selection_seconds for each in done),
            "adaptations": len(done),
            "undone": sum(bool(each.undone) for each in done),
            "trained_share": float(np.mean([len(d.trained) / d.groups for d in done] or [0.0])),
            "peak_bytes": went.peak - before,
            "store_bytes": store.used_bytes,
            "stored": len(store),
            "reads": learner.reads if how.read else "",
        }


def _home_sums(
    model: nn.Module, kind: StreamTask, data: Labelled, known: Sequence[int]
) -> HeadSums:
    return head_sums(model, _batches_at_home(kind, data, known))


def _batches_at_home(kind: StreamTask, data: Labelled, known: Sequence[int]) -> list[Batch]:
    targets = torch.from_numpy(np.searchsorted(known, data.y))
    return [
        (kind.prepare(torch.from_numpy(data.x[rows])), targets[rows])
        for rows in np.array_split(np.arange(len(data)), max(len(data) // 64, 1))
    ]


@dataclass
class _Walk:
    """What was observed along a stream."""

    correct: list[bool] = field(default_factory=list)
    table: list[list[float]] = field(default_factory=list)
    seconds: float = 0.0
    peak: int = 0


def _sent(learner: StreamLearner, task: StreamTask, stream: Stream) -> _Walk:
    """Show the learner the whole stream; after each task test it on all tasks.

    Tests count neither in the seconds nor in the peak.
    """
    walk = _Walk()
    for start, end in pairwise([*stream.starts, len(stream.samples)]):
        set_back_peak()
        began = time.process_time()
        for first in range(start, end, task.together):
            part = stream.samples[slice(first, min(first + task.together, end))]
            seen = learner.observe_batch(part.x, part.y)
            walk.correct += [bool(each.correct) for each in seen]
        walk.seconds += time.process_time() - began
        walk.peak = max(walk.peak, resident_bytes("VmHWM"))
        walk.table.append([_accuracy(learner, task, test) for test in stream.tests])
    return walk


def _replay(method: StreamMethod, task: StreamTask) -> Replay:
    if not method.replay:
        return Replay(stored_share=0.0)
    return Replay(stored_share=task.latent_stored if method.latent else task.stored)


def _accuracy(learner: StreamLearner, task: StreamTask, test: Labelled) -> float:
    hits = 0
    labels = np.array(learner.classes)
    with torch.no_grad():
        for start in range(0, len(test), 128):
            part = test[slice(start, start + 128)]
            scores = learner.model(task.prepare(torch.from_numpy(part.x)))[:, : len(labels)]
            hits += int((labels[scores.argmax(1).numpy()] == part.y).sum())
    return hits / len(test)


def _over_tasks(table: list[list[float]]) -> Row:
    """Return the mean accuracy over all tasks at the end, and the mean forgetting of all tasks but the last.

    Forgetting is a task's best accuracy at any test before the last, minus that of the last test (Chaudhry et al.,
    ECCV 2018).
    """
    accuracies = np.array(table)
    if not accuracies.size:
        return {}
    fallen = accuracies[:-1, :-1].max(0) - accuracies[-1, :-1]
    return {"average": float(accuracies[-1].mean()), "forgetting": float(fallen.mean())}


def _mean_recovery(correct: NDArray[np.bool_], drifts: Sequence[int]) -> float | None:
    """Return the mean number of samples after a change until the accuracy is back at 95 % of the value before.

    The accuracy is that along the stream, in which older samples count less and less (Gama et al., 2013). A change
    without recovery counts with all samples up to the next change.
    """
    accuracy = pd.Series(correct.astype(float)).ewm(alpha=1 - _FADING).mean().to_numpy()
    found = [
        recovery(accuracy[:end], drift)
        for drift, end in zip(drifts, [*drifts, len(correct)][1:], strict=True)
    ]
    return float(np.mean(found)) if found else None


def recovery(accuracy: NDArray[np.float64], drift: int) -> int:
    """Return the number of samples after a change until the accuracy is back at 95 % of the value just before.

    It is 0 if the accuracy never fell below, and the number of remaining samples if it did not come back.

    >>> recovery(np.array([0.8, 0.8, 0.7, 0.5, 0.6, 0.77]), drift=2)
    3
    """
    below = accuracy[drift:] < _BACK * accuracy[drift - 1]
    if not below.any():
        return 0
    fell = int(below.argmax())
    back = ~below[fell:]
    return fell + int(back.argmax()) if back.any() else len(below)
