"""The sections of a scenario file: what each may hold, its defaults and bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt

from fl_elastic.flower.round_config import RoundConfig
from fl_elastic.named_models import check_model_name
from fl_elastic.settings import Number, Text, Truth, Whole, approved, known_among
from fl_elastic_simulations.data.datasets import check_dataset_name
from fl_elastic_simulations.data.partition import LAYOUTS, check_partition_name

__all__ = [
    "DataSection",
    "DeadlineSection",
    "MethodSection",
    "ModelSection",
    "TargetSection",
    "TrainingSection",
]

Count = Annotated[Whole, Ge(1)]
Share = Annotated[Number, Ge(0), Lt(1)]


@dataclass(frozen=True)
class DataSection:
    """``[data]``: which dataset, and how it is split over the clients.

    Parameters
    ----------
    dataset : str
        A registered dataset.
    partition : str
        ``iid``, ``dirichlet``, ``pathological`` or ``natural``, or ``module:callable``, see
        `data.own_partition.dealt`.
    alpha : float
        Of a Dirichlet partition: small is skewed.
    layout : str
        ``independent`` of the devices' speed, or ``correlated``: the slow devices hold what nobody else has.
    min_examples : int
        Size of the smallest client.
    train_limit, test_limit : int, optional
        Use only so many examples, drawn at random: the files of some datasets are sorted by class.
    image_size : int, optional
        Height and width to which images are resized.
    classes_per_client : int
        Of a pathological partition: how many classes each client has.
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
    """``[model]``: what is trained.

    Parameters
    ----------
    name : str
        A registered or torchvision model, or ``module:callable``.
    weights : str, optional
        File of pretrained weights in the data folder.
    """

    name: Annotated[Text, approved(check_model_name)]
    weights: Text | None = None


@dataclass(frozen=True)
class TrainingSection:
    """``[training]``: how each client trains, and for how many rounds.

    Parameters
    ----------
    rounds, local_epochs, batch_size : int
        Rounds of the federation, passes over the local data in each, examples per step.
    simulated_seconds : float, optional
        The run ends with the round that reaches so much simulated time.
    evaluate_every : int
        The global model is tested every so many rounds, and at the end.
    tests : int, optional
        Instead, so many tests at equal intervals of ``simulated_seconds``: each of the newest model whose round had
        ended by then, so that methods with short and with long rounds are tested alike.
    local_steps : int, optional
        Every client takes so many steps in a round, however much data it has, instead of whole passes.
    optimizer : str
        ``sgd``, ``adam`` or ``adamw``.
    learning_rate, momentum, weight_decay : float
        Of the optimizer; only ``sgd`` has a momentum.
    client_fraction : float
        Share of the clients that takes part in a round.
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
    """``[deadline]``: how long a round may take, from getting the model to having sent the update.

    Parameters
    ----------
    seconds : float, optional
        Simulated seconds.
    quantile : float, optional
        Of the times in which the clients could train and send everything, without the fifth at either end: 0 is the
        fastest of the others.
    """

    seconds: Annotated[Number, Gt(0)] | None = None
    quantile: Annotated[Number, Ge(0), Le(1)] | None = None


def _check_cut(cut: str) -> None:
    """Raise RegistryError unless it is a cut that a server can announce."""
    RoundConfig(cut=cut)


@dataclass(frozen=True)
class MethodSection:
    """``[method.NAME]``: one way to train the federation, to be compared with the others.

    Parameters
    ----------
    name : str
        Its name in tables and plots.
    policy, importance, rule, codec, server : str
        Names in the registries of those plug-ins, which check them.
    downlink_codec : str
        How the model is sent to clients: ``fp32``, ``fp16`` or ``bf16``.
    budgeted : bool
        Whether the clients' budgets apply.
    peer : str, optional
        Registered method of `fl_elastic_simulations.peers` that trains in place of the policy, merged as its
        paper says.
    stragglers : str
        With a deadline: ``fit`` plans each client's round to it, ``wait`` waits for everyone, ``drop`` leaves out
        who would be late.
    weighting : str, optional
        ``examples`` or ``uniform``; the peer's, or examples.
    normalise_steps : bool
        Divide each change by the client's steps (FedNova, per tensor).
    server_optimizer : str, optional
        Registered lazy server optimiser, at ``server_rate``.
    server_rate : float, optional
        Its learning rate.
    average : float
        Decay of the mean of the global models that is tested, as in `fl_elastic.aggregation.ModelAverage`; 0 tests
        the newest model.
    proximal : float
        Weight of FedProx's pull.
    plan : str
        Who chooses what is trained: each client (``local``), the ``server`` for all, or nobody (``none``).
    deep_every : int
        `full_update_every` of `fl_elastic.training.TrainerOptions`.
    inference_prefix : bool
        Whether the frozen prefix runs as inference.
    round_zero : str
        ``none``, or ``closed_form``: before the first round the head is solved for from sums of all clients.
    read : str
        Where such a head reads: ``last``, ``auto`` or names of places, as `fl_elastic.flower.RoundConfig` has them.
    solve_every : int
        Rounds between two heads in closed form, in which nobody trains it; 0 trains it after round zero.
    cut : str
        ``none``, ``fixed:GROUP``, the deepest group, or module, that anybody trains, or ``moving``,
        where the server finds it.
    keep_features : bool
        Whether clients keep the features at the cut from round to round.
    """

    name: Text
    policy: Text
    importance: Text = "elastic"
    rule: Text = "contributors"
    codec: Text = "fp32"
    budgeted: Truth = True
    server: Text = "fedavg"
    peer: Text | None = None
    stragglers: Annotated[Text, known_among("stragglers", lambda: ("fit", "wait", "drop"))] = "fit"
    weighting: Annotated[Text, known_among("weighting", lambda: ("examples", "uniform"))] | None = (
        None
    )
    normalise_steps: Truth = False
    server_optimizer: Text | None = None
    server_rate: Annotated[Number, Gt(0)] | None = None
    average: Share = 0.0
    proximal: Annotated[Number, Ge(0)] = 0.0
    plan: Annotated[Text, known_among("plan", lambda: ("local", "server", "none"))] = "local"
    deep_every: Annotated[Whole, Ge(0)] = 4
    inference_prefix: Truth = False
    round_zero: Annotated[Text, known_among("round_zero", lambda: ("none", "closed_form"))] = "none"
    read: Text = "last"
    solve_every: Annotated[Whole, Ge(0)] = 5
    cut: Annotated[Text, approved(_check_cut)] = "none"
    keep_features: Truth = True
    downlink_codec: Text = "fp32"


@dataclass(frozen=True)
class TargetSection:
    """``[target]``: the accuracy whose time of arrival is compared.

    Parameters
    ----------
    method : str
        Method whose final accuracy sets the target.
    minus : float
        Subtracted from that accuracy.
    """

    method: Text = "full"
    minus: Share = 0.01
