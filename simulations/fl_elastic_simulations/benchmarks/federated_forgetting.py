"""Ways in which a federation forgets what one of its clients had."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fl_elastic.budget import Budget
from fl_elastic.errors import ElasticError
from fl_elastic.flower import ElasticClient, RoundConfig
from fl_elastic.flower.round import RoundRecord
from fl_elastic.losses import classification_loss
from fl_elastic.update import Manifest, load_weights, weights_of
from fl_elastic_simulations.benchmarks.forgetting_tasks import BATCH, ForgetTask, Split
from fl_elastic_simulations.engine.client_rounds import client_rounds
from fl_elastic_simulations.engine.quiet import quiet_log

__all__ = ["FEDERATED_WAYS", "federated"]

_PASSES = 2


def federated(
    model: nn.Module,
    split: Split,
    task: ForgetTask,
    rounds: int,
    *,
    had: bool,
    forgets: bool = False,
) -> nn.Module:
    """Train a model in rounds of a federation, two passes each; return it.

    Parameters
    ----------
    had : bool
        Whether the first client trains on what is to be forgotten.
    forgets : bool
        Whether it wishes that to be forgotten, and the server listens.
    """
    manifest = Manifest.of(model)
    own = torch.randperm(
        len(split.kept[1]), generator=torch.Generator().manual_seed(task.clients)
    ).chunk(task.clients)
    clients = [
        ElasticClient(
            model, _loader(_of(split, rows, had=had and not number), number), [],
            budget=Budget(), policy="full", loss_fn=classification_loss, epochs=_PASSES,
            optimizer_fn=partial(torch.optim.Adam, lr=task.learning_rate), client_id=str(number),
            forget=_loader(split.forgotten, number) if forgets and not number else None,
        )
        for number, rows in enumerate(own)
    ]  # fmt: skip
    records: list[RoundRecord] = []
    with quiet_log():
        weights = client_rounds(
            clients.__getitem__, task.clients, weights_of(model, manifest), rounds,
            terms=RoundConfig(forget=forgets), on_round=records.append,
        )  # fmt: skip
    # Of examples like many others no weight may matter so much more.
    if forgets and all(each.trains for each in records):
        raise ElasticError("the server has not seen to what a client wants forgotten")
    load_weights(model, manifest, weights)
    return model


def _retrained(model: nn.Module, split: Split, task: ForgetTask, fresh: nn.Module) -> nn.Module:
    return federated(fresh, split, task, task.epochs, had=False)


def _fine_tuned(model: nn.Module, split: Split, task: ForgetTask, fresh: nn.Module) -> nn.Module:
    return federated(model, split, task, task.short, had=False)


def _dampened(model: nn.Module, split: Split, task: ForgetTask, fresh: nn.Module) -> nn.Module:
    """Go on for one round, with which the wish comes, and dampen."""
    return federated(model, split, task, 1, had=False, forgets=True)


def _one_round(model: nn.Module, split: Split, task: ForgetTask, fresh: nn.Module) -> nn.Module:
    return federated(model, split, task, 1, had=False)


FEDERATED_WAYS: dict[str, Callable[[nn.Module, Split, ForgetTask, nn.Module], nn.Module]] = {
    "retrained": _retrained,
    "one round more": _one_round,
    "fine-tuned": _fine_tuned,
    "dampened": _dampened,
}
"""By the name in the table; each is given the trained model, which it may change, and a fresh one."""


def _of(split: Split, rows: Tensor, *, had: bool) -> tuple[Tensor, Tensor]:
    x, y = split.kept[0][rows], split.kept[1][rows]
    if not had:
        return x, y
    return torch.cat([x, split.forgotten[0]]), torch.cat([y, split.forgotten[1]])


def _loader(data: tuple[Tensor, Tensor], number: int) -> DataLoader[Any]:
    order = torch.Generator().manual_seed(number)
    return DataLoader(TensorDataset(*data), batch_size=BATCH, shuffle=True, generator=order)
