"""The sections of a scenario file: their keys, defaults and bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt

from fl_elastic.flower.round_config import RoundConfig
from fl_elastic.named_models import check_model_name
from fl_elastic.settings import Number, Text, Truth, Whole, approved, known_among
from fl_elastic_simulations.data.datasets import check_dataset_name
from fl_elastic_simulations.data.partition import LAYOUTS, check_partition_name

Count = Annotated[Whole, Ge(1)]
Share = Annotated[Number, Ge(0), Lt(1)]


@dataclass(frozen=True)
class DataSection:
    """``[data]``: the dataset, and how it is split over the clients.

    Parameters
    ----------
    dataset : str
        A registered dataset.
    partition : str
        ``iid``, ``dirichlet``, ``pathological`` or ``natural``, or ``module:callable``, see
        `data.own_partition.dealt`.
    alpha : float
        Parameter of a Dirichlet partition; small values give skewed classes.
    layout : str
        ``independent`` of the devices' speed, or ``correlated``: slow devices hold data that no others have.
    min_examples : int
        Number of examples of the smallest client.
    train_limit, test_limit : int, optional
        Use only this many examples, drawn at random, since the files of some datasets are sorted by class.
    image_size : int, optional
        Height and width to which images are resized.
    classes_per_client : int
        Number of classes of each client in a pathological partition.
    """

    dataset: Annotated[Text, approved(check_dataset_name)]
    partition: Annotated[Text, approved(check_partition_name)] = "iid"
    alpha: Annotated[Number, Gt(0)] = 0.5
    min_examples: Count = 10
    train_limit: Count | None = None
    test_limit: Count | None = None
    layout: Annotated[Text, known_among("layout", lambda: LAYOUTS)] = "independent"
    image_size: Annotated[Whole, Ge(1), Le(4096)] | None = None
    classes_per_client: Count = 2


@dataclass(frozen=True)
class ModelSection:
    """``[model]``: the model to train.

    Parameters
    ----------
    name : str
        A registered or torchvision model, or ``module:callable``.
    weights : str, optional
        File of pretrained weights, relative to the data folder.
    """

    name: Annotated[Text, approved(check_model_name)]
    weights: Text | None = None


@dataclass(frozen=True)
class TrainingSection:
    """``[training]``: how each client trains, and for how many rounds.

    Parameters
    ----------
    rounds, local_epochs, batch_size : int
        Rounds of the federation, passes over the local data per round, examples per step.
    simulated_seconds : float, optional
        Simulated time at which the run ends, after the current round.
    evaluate_every : int
        Number of rounds between two tests of the global model, which is also tested at the end.
    tests : int, optional
        If given, the number of tests at equal intervals of ``simulated_seconds`` instead. Each test is of the
        newest model whose round had ended by then, so that methods with short and with long rounds are tested
        alike.
    local_steps : int, optional
        Number of steps of every client per round, however much data it has, instead of whole passes.
    optimizer : str
        ``sgd``, ``adam`` or ``adamw``.
    learning_rate, momentum, weight_decay : float
        Settings of the optimiser; only ``sgd`` has a momentum.
    client_fraction : float
        Share of the clients that take part in a round.
    """

    rounds: Count
    local_epochs: Count = 1
    batch_size: Count = 32
    optimizer: Annotated[Text, known_among("optimizer", lambda: ("adam", "adamw", "sgd"))] = "sgd"
    learning_rate: Annotated[Number, Gt(0)] = 0.05
    momentum: Share = 0.0
    weight_decay: Annotated[Number, Ge(0)] = 0.0
    client_fraction: Annotated[Number, Gt(0), Le(1)] = 1.0
    simulated_seconds: Annotated[Number, Gt(0)] | None = None
    evaluate_every: Count = 1
    tests: Count | None = None
    local_steps: Count | None = None


@dataclass(frozen=True)
class DeadlineSection:
    """``[deadline]``: the time limit of a round, from receiving the model to having sent the update.

    Parameters
    ----------
    seconds : float, optional
        Limit in simulated seconds.
    quantile : float, optional
        Limit as a quantile of the times in which the clients could train and send everything, without the fifth of
        the clients at either end: 0 is the fastest of the others.
    """

    seconds: Annotated[Number, Gt(0)] | None = None
    quantile: Annotated[Number, Ge(0), Le(1)] | None = None


def _check_cut(cut: str) -> None:
    """Raise RegistryError unless it is a cut that a server can announce."""
    RoundConfig(cut=cut)


@dataclass(frozen=True)
class MethodSection:
    """``[method.NAME]``: one way to train the federation, compared with the others.

    Parameters
    ----------
    name : str
        Name of the method in tables and plots.
    policy, importance, rule, codec : str
        Names of registered plug-ins; the registries check them.
    downlink_codec : str
        Codec in which the model is sent to clients: ``fp32``, ``fp16`` or ``bf16``.
    budgeted : bool
        Whether the clients' budgets apply.
    peer : str, optional
        Registered method of `fl_elastic_simulations.peers` that trains instead of the policy; its updates are
        merged as in its paper.
    stragglers : str
        With a deadline: ``fit`` plans each client's round to meet it, ``wait`` waits for all clients, ``drop``
        leaves out clients that would be late.
    normalise_steps : bool
        Whether to divide each change by the client's steps (FedNova, per tensor).
    server_optimizer : str, optional
        Registered lazy server optimiser, with learning rate ``server_rate``.
    server_rate : float, optional
        Learning rate of the server optimiser.
    average : float
        Decay of the average of global models that is tested, see `fl_elastic.aggregation.ModelAverage`; 0 tests the
        newest model.
    plan : str
        Who chooses what is trained: each client (``local``), the ``server`` for all, or nobody (``none``).
    deep_every : int
        `full_update_every` of `fl_elastic.training.TrainerOptions`.
    round_zero : str
        ``none``, or ``closed_form``: before the first round, the head is solved from sums of all clients.
    read : str
        Where such a head reads: ``last``, ``auto`` or names of places, as in `fl_elastic.flower.RoundConfig`.
    solve_every : int
        Number of rounds from one head in closed form to the next; clients do not train the head. With 0 it is only
        solved in round zero, and then trained.
    cut : str
        ``none``; ``fixed:GROUP`` for the deepest group or module that any client trains; or ``moving``, so that the
        server finds it.
    keep_features : bool
        Whether clients keep the features at the cut from round to round.
    """

    name: Text
    policy: Text
    importance: Text = "elastic"
    rule: Text = "contributors"
    codec: Text = "fp32"
    budgeted: Truth = True
    peer: Text | None = None
    stragglers: Annotated[Text, known_among("stragglers", lambda: ("fit", "wait", "drop"))] = "fit"
    normalise_steps: Truth = False
    server_optimizer: Text | None = None
    server_rate: Annotated[Number, Gt(0)] | None = None
    average: Share = 0.0
    plan: Annotated[Text, known_among("plan", lambda: ("local", "server", "none"))] = "local"
    deep_every: Annotated[Whole, Ge(0)] = 4
    round_zero: Annotated[Text, known_among("round_zero", lambda: ("none", "closed_form"))] = "none"
    read: Text = "last"
    solve_every: Annotated[Whole, Ge(0)] = 5
    cut: Annotated[Text, approved(_check_cut)] = "none"
    keep_features: Truth = True
    downlink_codec: Text = "fp32"


@dataclass(frozen=True)
class TargetSection:
    """``[target]``: the accuracy for which methods' times to reach it are compared.

    Parameters
    ----------
    method : str
        Method whose final accuracy sets the target.
    minus : float
        Subtracted from that accuracy.
    """

    method: Text = "full"
    minus: Share = 0.01
