"""The sections of a scenario file, as plain values."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "DataSection",
    "DeadlineSection",
    "FleetSection",
    "MethodSection",
    "ModelSection",
    "TargetSection",
    "TrainingSection",
]


@dataclass(frozen=True)
class DataSection:
    """``[data]``: which dataset, and how it is split over the clients.

    Parameters
    ----------
    dataset : str
        A registered dataset.
    partition : str
        ``iid``, ``dirichlet`` or ``natural``.
    alpha : float
        Of a Dirichlet partition: small is skewed.
    layout : str
        ``independent`` of the devices' speed, or ``correlated``: the slow devices hold what nobody else has.
    min_examples : int
        Size of the smallest client.
    train_limit, test_limit : int, optional
        Use only so many examples, drawn at random: the files of some datasets are sorted by class.
    """

    dataset: str
    partition: str
    alpha: float
    min_examples: int
    train_limit: int | None
    test_limit: int | None
    layout: str = "independent"


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

    name: str
    weights: str | None = None


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

    rounds: int
    local_epochs: int
    batch_size: int
    optimizer: str
    learning_rate: float
    momentum: float
    weight_decay: float
    client_fraction: float
    simulated_seconds: float | None = None
    evaluate_every: int = 1
    tests: int | None = None
    local_steps: int | None = None


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

    seconds: float | None
    quantile: float | None


@dataclass(frozen=True)
class FleetSection:
    """``[[fleet]]``: some clients on the same kind of device.

    Parameters
    ----------
    name : str, optional
        Of this class of clients, where it is not the device's.
    device : str
        A name of the device catalogue.
    count : int
        How many clients.
    speedup : float
        How many times faster than a full round their local training must be.
    uplink_share : float, optional
        Share of a full update that they may send per round.
    slowdown, memory_bytes, uplink_bytes_per_second, downlink_bytes_per_second : optional
        Replace the figure of the catalogue.
    """

    device: str
    count: int
    speedup: float
    uplink_share: float | None
    slowdown: float | None
    memory_bytes: int | None
    uplink_bytes_per_second: float | None
    downlink_bytes_per_second: float | None
    name: str | None = None


@dataclass(frozen=True)
class MethodSection:
    """``[method.NAME]``: one way to train the federation, to be compared with the others.

    Parameters
    ----------
    name : str
        Its name in tables and plots.
    policy, importance, rule, codec, server : str
        Names in the registries of those plug-ins, which check them.
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
    quota : int
        Rounds after which a client trains what it left out; 0 for none.
    blend : float
        Weight of the fleet's importance.
    plan_source : str
        ``local``, ``server`` or ``shared_rng``.
    deep_every, exploration, returns : int, float, float
        As in `fl_elastic.training.TrainerOptions`.
    inference_prefix : bool
        Whether the frozen prefix runs as inference.
    """

    name: str
    policy: str
    importance: str
    rule: str
    codec: str
    budgeted: bool
    server: str
    peer: str | None = None
    stragglers: str = "fit"
    weighting: str | None = None
    normalise_steps: bool = False
    server_optimizer: str | None = None
    server_rate: float | None = None
    average: float = 0.0
    proximal: float = 0.0
    quota: int = 0
    blend: float = 0.0
    plan_source: str = "local"
    deep_every: int = 4
    exploration: float = 0.3
    returns: float = 0.5
    inference_prefix: bool = False


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

    method: str
    minus: float
