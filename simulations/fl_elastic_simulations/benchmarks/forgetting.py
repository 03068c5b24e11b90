"""What ways to forget leave of what was to be forgotten, and of everything else."""

from __future__ import annotations

import copy
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax, softmax

from fl_elastic.groups import Batch
from fl_elastic.losses import classification_loss
from fl_elastic.named_models import build_model
from fl_elastic.training.forget import dampen, squared_gradients
from fl_elastic_simulations.benchmarks.results import Results
from fl_elastic_simulations.data.datasets import load_dataset

__all__ = [
    "FORGET_TASKS",
    "METHODS",
    "bench_forget",
    "forget_filled",
    "forget_markdown",
    "membership",
]

_BATCH, _AT_ONCE = 64, 256
# Of the passes that training took.
_SHORT = 0.2
_ALPHA = 3.0


@dataclass(frozen=True)
class ForgetTask:
    """Data and model, how long it is trained, and what is to be forgotten.

    Parameters
    ----------
    share : float
        Of the training examples that are to be forgotten; 0 for all of one class, the first of which the seed says.
    """

    title: str
    dataset: str
    model: str
    epochs: int
    train_limit: int
    test_limit: int
    learning_rate: float = 1e-3
    share: float = 0.0


FORGET_TASKS = {
    "digits, a class": ForgetTask("Digits, one class", "digits", "digits_cnn", 20, 1300, 450),
    "digits, examples": ForgetTask(
        "Digits, a twentieth of the examples", "digits", "digits_cnn", 20, 1300, 450, share=0.05
    ),
    "cifar, a class": ForgetTask(
        "CIFAR-10, one class", "cifar10_jpegq75", "small_cnn", 8, 6000, 2000
    ),
    "cifar, examples": ForgetTask(
        "CIFAR-10, a twentieth", "cifar10_jpegq75", "small_cnn", 8, 6000, 2000, share=0.05
    ),
    "signs, a class": ForgetTask("Traffic signs, one class", "gtsrb", "small_cnn", 6, 6000, 2000),
    "signs, examples": ForgetTask(
        "Traffic signs, a twentieth", "gtsrb", "small_cnn", 6, 6000, 2000, share=0.05
    ),
}  # fmt: skip
"""By the name on the command line."""


@dataclass(frozen=True, eq=False)
class _Split:
    """Training examples that stay and those that are to be forgotten; the test alike."""

    kept: tuple[Tensor, Tensor]
    forgotten: tuple[Tensor, Tensor]
    test_kept: tuple[Tensor, Tensor]
    test_forgotten: tuple[Tensor, Tensor]

    @property
    def everything(self) -> tuple[Tensor, Tensor]:
        """All training examples."""
        x, y = (torch.cat(pair) for pair in zip(self.kept, self.forgotten, strict=True))
        return x, y


def _as_it_was(model: nn.Module, split: _Split, task: ForgetTask, fresh: nn.Module) -> nn.Module:
    return model


def _retrained(model: nn.Module, split: _Split, task: ForgetTask, fresh: nn.Module) -> nn.Module:
    return _train(fresh, split.kept, task, task.epochs)


def _fine_tuned(model: nn.Module, split: _Split, task: ForgetTask, fresh: nn.Module) -> nn.Module:
    return _train(model, split.kept, task, _short(task))


def _amnesiac(model: nn.Module, split: _Split, task: ForgetTask, fresh: nn.Module) -> nn.Module:
    """Train on, with labels by chance for what is to be forgotten (after Graves et al., AAAI 2021)."""
    x, y = split.forgotten
    classes = int(split.everything[1].max()) + 1
    other = (y + torch.randint(1, classes, y.shape)) % classes
    data = torch.cat([split.kept[0], x]), torch.cat([split.kept[1], other])
    return _train(model, data, task, _short(task))


def _blindspot(model: nn.Module, split: _Split, task: ForgetTask, fresh: nn.Module) -> nn.Module:
    """Learn what is to be forgotten from a model that knows nothing (Chundawat et al., AAAI 2023)."""
    teacher = copy.deepcopy(model).eval()
    blind = fresh.eval()
    x, y = split.everything
    from_blind = torch.cat([torch.zeros_like(split.kept[1]), torch.ones_like(split.forgotten[1])])

    def loss(scores: Tensor, rows: Tensor) -> Tensor:
        with torch.no_grad():
            told = torch.where(from_blind[rows].bool()[:, None], blind(x[rows]), teacher(x[rows]))
        return kl_div(log_softmax(scores, 1), softmax(told, 1), reduction="batchmean")

    return _train(model, (x, y), task, _short(task), loss)


def _dampened(model: nn.Module, split: _Split, task: ForgetTask, fresh: nn.Module) -> nn.Module:
    few = squared_gradients(model, classification_loss, _batches(split.forgotten))
    everything = few + squared_gradients(model, classification_loss, _batches(split.kept))
    dampen(model, few, everything, alpha=_ALPHA)
    return model


METHODS: dict[str, Callable[[nn.Module, _Split, ForgetTask, nn.Module], nn.Module]] = {
    "as it was": _as_it_was,
    "retrained": _retrained,
    "fine-tuned": _fine_tuned,
    "amnesiac": _amnesiac,
    "blindspot": _blindspot,
    "dampened": _dampened,
}
"""By the name in the table; each is given the trained model, which it may change, and a fresh one."""


def bench_forget(
    results: Results,
    data_root: str | Path | None = None,
    *,
    tasks: Iterable[str] = (),
    seeds: Iterable[int] = (0, 1, 2),
    tell: Callable[[str], None] = print,
) -> None:
    """Train a model, let it forget in each way, and test what is left; one thread and its CPU time."""
    torch.set_num_threads(1)
    for name in tasks or FORGET_TASKS:
        for seed in seeds:
            if all(f"{name} | {method} | {seed}" in results.rows for method in METHODS):
                continue
            task, split = FORGET_TASKS[name], _split(FORGET_TASKS[name], data_root, seed)
            trained = _train(_fresh(task, split, seed), split.everything, task, task.epochs)
            for method, run in METHODS.items():
                torch.manual_seed(seed)
                # Another start than that of the model: retraining is no repetition.
                fresh = _fresh(task, split, seed + 1000)
                started = time.thread_time()
                model = run(copy.deepcopy(trained), split, task, fresh)
                row = _tested(model, split) | {"seconds": time.thread_time() - started}
                results.add(f"{name} | {method} | {seed}", row)
                tell(f"{name} | {method} | {seed}: {row}")


def forget_markdown(rows: Mapping[str, Mapping[str, Any]], task: str) -> str:
    """Return the table of one task: means over the seeds."""
    lines = [
        "| | seeds | kept, test | to be forgotten, training | to be forgotten, test | said to be members | CPU s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for method in METHODS:
        found = [r for name, r in rows.items() if name.startswith(f"{task} | {method} | ")]
        if found:
            cells = [
                _mean(found, key) for key in ("kept", "forgotten", "test_forgotten", "members")
            ]
            seconds = statistics.fmean(row["seconds"] for row in found)
            lines.append(f"| {method} | {len(found)} | {' | '.join(cells)} | {seconds:.3g} |")
    return "\n".join(lines)


def forget_filled(text: str, rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a document with the table of each task between its marks."""

    def table(found: re.Match[str]) -> str:
        return "\n".join([found[1], forget_markdown(rows, found[2]), found[3]])

    marked = r"(<!-- forget ([\w ,]+) -->)\n.*?(<!-- end -->)"
    return re.sub(marked, table, text, flags=re.DOTALL)


def _mean(rows: list[Mapping[str, Any]], key: str) -> str:
    known = [row[key] for row in rows if row[key] is not None]
    return f"{100 * statistics.fmean(known):.1f}" if known else ""


def membership(
    kept: NDArray[np.float64], test: NDArray[np.float64], forgotten: NDArray[np.float64]
) -> float:
    """Return the share of forgotten examples that an attacker takes for members.

    Logistic regression with balanced classes on the entropy of the model's answers, trained to tell kept training
    examples from test examples, as in the published code of selective synaptic dampening. What one should come near
    to is its value for a model that was trained without them, not 0.

    Parameters
    ----------
    kept, test, forgotten : array
        Entropies.
    """
    from sklearn.linear_model import LogisticRegression

    attack = LogisticRegression(class_weight="balanced")
    told = np.concatenate([np.ones(len(kept)), np.zeros(len(test))])
    attack.fit(np.concatenate([kept, test])[:, None], told)
    return float(attack.predict(forgotten[:, None]).mean())


def _split(task: ForgetTask, data_root: str | Path | None, seed: int) -> _Split:
    data = load_dataset(task.dataset, data_root)
    draw = np.random.default_rng(seed)
    train = draw.permutation(len(data.train_y))[: task.train_limit]
    test = draw.permutation(len(data.test_y))[: task.test_limit]
    y, test_y = data.train_y[train], data.test_y[test]
    if task.share:
        gone = draw.random(len(train)) < task.share
        test_gone = np.zeros(len(test), bool)
    else:
        # A class that is there often enough to be tested.
        known = np.bincount(test_y, minlength=data.classes)
        label = draw.choice(np.flatnonzero(known >= max(10, np.median(known))))
        gone, test_gone = y == label, test_y == label

    def part(x: Any, labels: Any, rows: Any) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(x[rows]), torch.from_numpy(labels[rows])

    return _Split(
        part(data.train_x, data.train_y, train[~gone]),
        part(data.train_x, data.train_y, train[gone]),
        part(data.test_x, data.test_y, test[~test_gone]),
        part(data.test_x, data.test_y, test[test_gone]),
    )


def _fresh(task: ForgetTask, split: _Split, seed: int) -> nn.Module:
    classes = int(max(split.everything[1].max(), split.test_kept[1].max())) + 1
    return build_model(task.model, tuple(split.kept[0].shape[1:]), classes, seed)


def _train(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    task: ForgetTask,
    epochs: int,
    loss_of_rows: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> nn.Module:
    x, y = data
    optimizer = torch.optim.Adam(model.parameters(), lr=task.learning_rate)
    model.train()
    for _ in range(epochs):
        for rows in torch.split(torch.randperm(len(y)), _BATCH):
            optimizer.zero_grad()
            scores = model(x[rows])
            loss = (
                cross_entropy(scores, y[rows])
                if loss_of_rows is None
                else loss_of_rows(scores, rows)
            )
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return model


def _short(task: ForgetTask) -> int:
    return max(round(_SHORT * task.epochs), 1)


def _batches(data: tuple[Tensor, Tensor]) -> list[Batch]:
    return list(zip(torch.split(data[0], _AT_ONCE), torch.split(data[1], _AT_ONCE), strict=True))


def _tested(model: nn.Module, split: _Split) -> dict[str, Any]:
    model.eval()
    parts = {
        "kept": split.test_kept, "forgotten": split.forgotten, "test_forgotten": split.test_forgotten
    }  # fmt: skip
    right = {name: _right(model, part) for name, part in parts.items()}
    members = membership(
        *(_entropies(model, part) for part in (split.kept, split.test_kept, split.forgotten))
    )
    return {**right, "members": members}


def _right(model: nn.Module, data: tuple[Tensor, Tensor]) -> float | None:
    if not len(data[1]):
        return None
    with torch.no_grad():
        found = [int((model(x).argmax(1) == y).sum()) for x, y in _batches(data)]
    return sum(found) / len(data[1])


def _entropies(model: nn.Module, data: tuple[Tensor, Tensor]) -> NDArray[np.float64]:
    with torch.no_grad():
        told = torch.cat([log_softmax(model(x), 1) for x, _ in _batches(data)])
    entropies: NDArray[np.float64] = -(told.exp() * told).sum(1).double().numpy()
    return entropies
