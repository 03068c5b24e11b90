"""Selectors trained on subsets of a public set: the tasks, what is seen on them, and what is learned."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from fl_elastic.methods.learned_selector.set_summary import FEATURES
from fl_elastic_simulations.data.datasets import load_dataset
from fl_elastic_simulations.models.selector_training import (
    PseudoTask,
    Seen,
    pseudo_tasks,
    seen_on,
    train_selector,
)


def net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5),
        )  # fmt: skip


def tasks(count: int, seed: int = 0) -> list[PseudoTask]:
    return list(pseudo_tasks(load_dataset("digits"), count, (8, 12), seed, examples=16))


def test_tasks_are_subsets_of_classes_by_turns_with_and_without_a_head() -> None:
    found = tasks(4)
    assert [task.prototypes for task in found] == [False, True, False, True]
    for number, task in enumerate(found):
        inputs, classes = task.batch
        size = (8, 12)[number % 2]
        assert inputs.shape == (16 * (1 + task.prototypes), 3, size, size) and classes.shape == (
            16,
        )
        assert 2 <= len(task.rest[1].unique()) <= 10
        assert int(classes.max()) < len(task.rest[1].unique()) or task.prototypes
    again = tasks(4)
    assert all(torch.equal(a.batch[0], b.batch[0]) for a, b in zip(found, again, strict=True))


def test_what_is_seen_leaves_the_model_as_it_was() -> None:
    model = net()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    for task in tasks(2):
        seen = seen_on(model, "7", task)
        # With a head three layers of 3 + 8, 8 + 16 and 16 + classes channels, else two.
        channels = 35 if task.prototypes else 51 + len(task.rest[1].unique())
        assert seen.rows.shape == (channels, len(FEATURES))
        assert abs(seen.potentials.mean()) < 1e-9
        assert seen.weights.sum() == (4 if task.prototypes else 6)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_a_network_learns_what_potentials_are_on_other_tasks() -> None:
    model = net()
    seen = [seen_on(model, "7", task) for task in tasks(6)]
    held_out = [seen_on(model, "7", task) for task in tasks(4, seed=9)]

    def error(network: object, task: Seen) -> float:
        said = network(task.rows)  # type: ignore[operator]
        return float(np.average((said - task.potentials) ** 2, weights=task.weights))

    network = train_selector(seen, steps=300, width=16, tell=lambda _: None)
    for task in held_out:
        mean = np.average(task.potentials, weights=task.weights)
        spread = np.average((task.potentials - mean) ** 2, weights=task.weights)
        assert error(network, task) < 0.7 * spread
    again = train_selector(seen, steps=300, width=16, tell=lambda _: None)
    assert error(again, held_out[0]) == error(network, held_out[0])
