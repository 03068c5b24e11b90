"""What ways to forget leave of what was to be forgotten, and of everything else."""

from __future__ import annotations

import copy
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax, softmax

from fl_elastic.groups import Batch
from fl_elastic.losses import classification_loss
from fl_elastic.methods.dampening.forget import dampen, squared_gradients
from fl_elastic_simulations.benchmarks.federated_forgetting import FEDERATED_WAYS, federated
from fl_elastic_simulations.benchmarks.forgetting_tasks import (
    ALPHA,
    BATCH,
    FORGET_TASKS,
    ForgetTask,
    Split,
    fresh_model,
    split_of,
)
from fl_elastic_simulations.benchmarks.results import Results

__all__ = [
    "FORGET_TASKS",
    "METHODS",
    "bench_forget",
    "forget_filled",
    "forget_markdown",
    "membership",
]

_AT_ONCE = 256


def _as_it_was(model: nn.Module, split: Split, task: ForgetTask, fresh: nn.Module) -> nn.Module:
    return model


def _retrained(model: nn.Module, split: Split, task: ForgetTask, fresh: nn.Module) -> nn.Module:
    return _train(fresh, split.kept, task, task.epochs)


def _fine_tuned(model: nn.Module, split: Split, task: ForgetTask, fresh: nn.Module) -> nn.Module:
    return _train(model, split.kept, task, task.short)


def _amnesiac(model: nn.Module, split: Split, task: ForgetTask, fresh: nn.Module) -> nn.Module:
    """Train on, with labels by chance for what is to be forgotten (after Graves et al., AAAI 2021)."""
    x, y = split.forgotten
    classes = int(split.everything[1].max()) + 1
    other = (y + torch.randint(1, classes, y.shape)) % classes
    data = torch.cat([split.kept[0], x]), torch.cat([split.kept[1], other])
    return _train(model, data, task, task.short)


def _blindspot(model: nn.Module, split: Split, task: ForgetTask, fresh: nn.Module) -> nn.Module:
    """Learn what is to be forgotten from a model that knows nothing (Chundawat et al., AAAI 2023)."""
    teacher = copy.deepcopy(model).eval()
    blind = fresh.eval()
    x, y = split.everything
    from_blind = torch.cat([torch.zeros_like(split.kept[1]), torch.ones_like(split.forgotten[1])])

    def loss(scores: Tensor, rows: Tensor) -> Tensor:
        with torch.no_grad():
            told = torch.where(from_blind[rows].bool()[:, None], blind(x[rows]), teacher(x[rows]))
        return kl_div(log_softmax(scores, 1), softmax(told, 1), reduction="batchmean")

    return _train(model, (x, y), task, task.short, loss)


def _dampened(
    model: nn.Module,
    split: Split,
    task: ForgetTask,
    fresh: nn.Module,
    *,
    alpha: float | None = None,
    alike: bool = True,
) -> nn.Module:
    few, kept = (
        squared_gradients(model, classification_loss, _batches(each), alike=alike)
        for each in (split.forgotten, split.kept)
    )
    dampen(model, few, few + kept, alpha=alpha)
    return model


METHODS: dict[str, Callable[[nn.Module, Split, ForgetTask, nn.Module], nn.Module]] = {
    "as it was": _as_it_was,
    "retrained": _retrained,
    "fine-tuned": _fine_tuned,
    "amnesiac": _amnesiac,
    "blindspot": _blindspot,
    "dampened": _dampened,
    # With gradients as long as they are; the published number is for those of whole batches.
    "dampened, gradients as they are": partial(_dampened, alpha=ALPHA, alike=False),
}
"""By the name in the table; each is given the trained model, which it may change, and a fresh one."""


def ways_of(
    task: ForgetTask,
) -> dict[str, Callable[[nn.Module, Split, ForgetTask, nn.Module], nn.Module]]:
    """Return the ways in which a device, or a federation, forgets."""
    if not task.clients:
        return METHODS
    return {"as it was": _as_it_was, **FEDERATED_WAYS}


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
            task = FORGET_TASKS[name]
            ways = ways_of(task)
            if all(f"{name} | {method} | {seed}" in results.rows for method in ways):
                continue
            split = split_of(task, data_root, seed)
            trained = _trained(fresh_model(task, split, seed), split, task)
            for method, run in ways.items():
                torch.manual_seed(seed)
                # Another start than that of the model: retraining is no repetition.
                fresh = fresh_model(task, split, seed + 1000)
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
    for method in ways_of(FORGET_TASKS[task]):
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


def _trained(model: nn.Module, split: Split, task: ForgetTask) -> nn.Module:
    """Train a model on everything, here or by all clients."""
    if not task.clients:
        return _train(model, split.everything, task, task.epochs)
    return federated(model, split, task, task.epochs, had=True)


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
        for rows in torch.split(torch.randperm(len(y)), BATCH):
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


def _batches(data: tuple[Tensor, Tensor]) -> list[Batch]:
    return list(zip(torch.split(data[0], _AT_ONCE), torch.split(data[1], _AT_ONCE), strict=True))


def _tested(model: nn.Module, split: Split) -> dict[str, Any]:
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
