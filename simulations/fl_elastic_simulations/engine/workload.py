"""The work that a scenario gives to each client: data, model, optimiser, costs."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fl_elastic.errors import DatasetError, ScenarioError
from fl_elastic.groups import Batch
from fl_elastic.losses import classification_loss
from fl_elastic.named_models import build_model
from fl_elastic.optimizers import OptimizerFn
from fl_elastic.planning import POLICIES
from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.clock import clock_for
from fl_elastic.profiling.profile import ProfileKey, profile_key
from fl_elastic.training.measured import full_pass_ratio
from fl_elastic_simulations.data.batches import Batches
from fl_elastic_simulations.data.datasets import (
    Dataset,
    data_root_folder,
    load_dataset,
    part_of,
)
from fl_elastic_simulations.data.partition import (
    PARTITIONS,
    Indices,
    correlated_labels,
    correlated_owners,
    partition_indices,
)

# Registers the models even if this package was sent instead of installed.
from fl_elastic_simulations.models import small as _small  # noqa: F401
from fl_elastic_simulations.scenario.scenario import Scenario
from fl_elastic_simulations.scenario.sections import DataSection, ModelSection, TrainingSection

# Larger batches do not fit into the cache: batches of 256 take twice as long for MobileNetV2 at 128 pixels.
_EVALUATION_BATCH = 32
# Number of times that two models are timed in turn.
_PAIRS = 9


def scenario_dataset(scenario: Scenario, data_root: str | None) -> Dataset:
    """Return the scenario's dataset; loaded once per process."""
    return load_dataset(scenario.data.dataset, data_root, scenario.data.image_size)


@lru_cache(maxsize=8)
def _parts(scenario: Scenario, data_root: str | None, seed: int) -> list[npt.NDArray[np.int64]]:
    """Split the (possibly limited) training set over the clients."""
    data, dataset = scenario.data, scenario_dataset(scenario, data_root)
    chosen = _limited(dataset.labels, data.train_limit, seed)
    slowdowns = [client.device.slowdown for client in scenario.clients]
    if data.partition == "natural" and dataset.owners is None:
        raise DatasetError(
            f"{dataset.name} has no owners for a natural partition: give Dataset(..., owners=...)"
        )
    owners = None if dataset.owners is None else dataset.owners[chosen]
    if data.layout == "correlated" and data.partition == "natural" and owners is not None:
        parts = correlated_owners(
            dataset.train_x[chosen], owners, slowdowns, min_examples=data.min_examples
        )
    elif data.layout == "correlated":
        parts = correlated_labels(
            dataset.labels[chosen],
            slowdowns,
            alpha=data.alpha,
            seed=seed,
            min_examples=data.min_examples,
        )
    else:
        split: Callable[..., list[Indices]] = partition_indices
        if data.partition not in PARTITIONS:
            # Imported here: few scenarios have a partition of their own.
            from fl_elastic_simulations.data.own_partition import dealt

            split = dealt
        parts = split(
            dataset.labels[chosen],
            len(scenario.clients),
            method=data.partition,
            alpha=data.alpha,
            classes_per_client=data.classes_per_client,
            seed=seed,
            min_examples=data.min_examples,
            owners=owners,
        )
    return [chosen[part] for part in parts]


def _limited(labels: npt.NDArray[np.int64], limit: int | None, seed: int) -> npt.NDArray[np.int64]:
    everything = np.arange(len(labels))
    if limit is None or limit >= len(labels):
        return everything
    return np.sort(np.random.default_rng(seed).choice(everything, limit, replace=False))


def client_batches(
    scenario: Scenario,
    data_root: str | None,
    seed: int,
    client: int,
    server_round: int,
    *,
    whole: bool = False,
) -> Batches:
    """Return the training batches of one client in one round, or of one pass over its data.

    If all clients take the same number of steps, a client with fewer examples than a batch repeats them, so that
    its steps cost what was measured.
    """
    dataset, part = scenario_dataset(scenario, data_root), _parts(scenario, data_root, seed)[client]
    steps = None if whole else scenario.training.local_steps
    if steps is not None and len(part) < scenario.training.batch_size:
        part = np.resize(part, scenario.training.batch_size)
    order = np.random.SeedSequence([seed, client, server_round]).generate_state(1)[0]
    return Batches(
        part_of(dataset.train_x, part),
        dataset.train_y[part],
        scenario.training.batch_size,
        seed=int(order),
        steps=steps,
    )


def label_counts(scenario: Scenario, data_root: str | None, seed: int) -> list[list[int]]:
    """Return the number of training examples of each client by class."""
    dataset = scenario_dataset(scenario, data_root)
    return [
        np.bincount(dataset.labels[part], minlength=dataset.classes).tolist()
        for part in _parts(scenario, data_root, seed)
    ]


def test_batches(scenario: Scenario, data_root: str | None) -> Batches:
    """Return the server's test batches."""
    dataset = scenario_dataset(scenario, data_root)
    chosen = _limited(dataset.test_y, scenario.data.test_limit, seed=0)
    x, y = part_of(dataset.test_x, chosen), dataset.test_y[chosen]
    return Batches(x, y, _EVALUATION_BATCH, seed=0, shuffle=False)


def scenario_model(scenario: Scenario, data_root: str | None, seed: int) -> nn.Module:
    """Return the scenario's model with the initial weights of a seed, pretrained if the scenario says so."""
    # Built once for all clients: drawing or reading weights takes longer than copying them.
    return copy.deepcopy(_first_model(scenario.model, scenario.data, data_root, seed))


@lru_cache(maxsize=2)
def _first_model(
    section: ModelSection, data: DataSection, data_root: str | None, seed: int
) -> nn.Module:
    dataset = load_dataset(data.dataset, data_root, data.image_size)
    model = build_model(section.name, dataset.input_shape, dataset.classes, seed)
    if section.weights is not None:
        # Imported only if pretrained weights are wanted.
        from fl_elastic_simulations.models.pretrained import load_pretrained

        load_pretrained(model, data_root_folder(data_root) / section.weights)
    return model


def first_batch(scenario: Scenario, data_root: str | None) -> Batch:
    """Return a batch of the dataset's first examples, for measurements and for shapes."""
    dataset = scenario_dataset(scenario, data_root)
    size = scenario.training.batch_size
    return torch.as_tensor(dataset.train_x[:size]), torch.as_tensor(dataset.train_y[:size])


def optimizer_fn(training: TrainingSection) -> OptimizerFn:
    """Return the scenario's optimiser as a function of the parameters."""

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        rate, decay = training.learning_rate, training.weight_decay
        if training.optimizer == "sgd":
            return torch.optim.SGD(
                parameters, lr=rate, momentum=training.momentum, weight_decay=decay
            )
        kind = torch.optim.AdamW if training.optimizer == "adamw" else torch.optim.Adam
        return kind(parameters, lr=rate, weight_decay=decay)

    return make


def measured_beside(
    scenario: Scenario, data_root: str | None, known: CostProfile, model: nn.Module
) -> CostProfile:
    """Measure a model's costs, and convert them to the speed of the host when it measured the scenario's model.

    Full passes of both models are timed in turn, so that other work slows both alike. The ratio of the models'
    full steps is the median over the pairs.

    Parameters
    ----------
    scenario : Scenario
        The scenario.
    data_root : str, optional
        Folder of datasets.
    known : CostProfile
        Costs of the scenario's model.
    model : nn.Module
        Another model for the same batches.
    """
    found = measure_profile(scenario, data_root, model)
    whole = scenario_model(scenario, data_root, seed=0).train()
    batch, timer = first_batch(scenario, data_root), clock_for(torch.device("cpu"), "cpu")

    def ratio(timed: nn.Module, profile: CostProfile) -> float:
        return full_pass_ratio(timed, classification_loss, batch, profile, timer)

    pairs = [ratio(model, found) / ratio(whole, known) for _ in range(_PAIRS)]
    return at_speed(found, statistics.median(pairs))


def at_speed(profile: CostProfile, factor: float) -> CostProfile:
    """Return a profile with all its seconds multiplied by a factor."""
    timed = [each.name for each in fields(CostProfile) if "seconds" in each.name]
    return replace(profile, **{name: factor * getattr(profile, name) for name in timed})


def measure_profile(
    scenario: Scenario,
    data_root: str | None,
    model: nn.Module | None = None,
    known: CostProfile | None = None,
) -> CostProfile:
    """Measure the costs of the scenario's model, or of another one, on this host with one thread and CPU time.

    The cheaper modes of its methods' policies are measured as well, once for all clients. With ``known`` costs,
    only missing ones are measured.

    Raises
    ------
    ScenarioError
        If the known costs are of another model, batch or optimiser.
    """
    # Imported here: a node of a real fleet, which has costs of its own, does not need it.
    from fl_elastic.profiling import profile_model
    from fl_elastic_simulations.engine.mode_costs import with_modes

    batch = first_batch(scenario, data_root)
    model = (scenario_model(scenario, data_root, seed=0) if model is None else model).train()
    make_optimizer = optimizer_fn(scenario.training)
    if known is not None:
        _refuse_others(known, profile_key(model, batch, make_optimizer))
    profile = known or profile_model(
        model, classification_loss, batch, optimizer_fn=make_optimizer, clock="cpu"
    )
    policies = [method.policy for method in scenario.methods if method.peer is None]
    modes = [mode for policy in policies for mode in POLICIES.make(policy).needs.modes]
    return with_modes(profile, model, clock_for(torch.device("cpu"), "cpu"), modes)


def _refuse_others(known: CostProfile, key: ProfileKey) -> None:
    """Raise ScenarioError for costs of another model, batch or optimiser; those of another host are accepted."""
    here = replace(known.key, model=key.model, batch_shape=key.batch_shape, optimizer=key.optimizer)
    differences = here.differences(known.key)
    if differences:
        raise ScenarioError(
            f"the costs in this folder are of another scenario ({'; '.join(differences)}): choose another "
            "folder, or leave out --resume"
        )
