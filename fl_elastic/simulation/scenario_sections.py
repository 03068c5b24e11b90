"""The sections of a scenario file, as plain values."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "DataSection",
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


@dataclass(frozen=True)
class ModelSection:
    """``[model]``: what is trained.

    Parameters
    ----------
    name : str
        A registered or torchvision model, or ``module:callable``.
    """

    name: str


@dataclass(frozen=True)
class TrainingSection:
    """``[training]``: how each client trains, and for how many rounds.

    Parameters
    ----------
    rounds, local_epochs, batch_size : int
        Rounds of the federation, passes over the local data in each, examples per step.
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


@dataclass(frozen=True)
class FleetSection:
    """``[[fleet]]``: some clients on the same kind of device.

    Parameters
    ----------
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
    """

    name: str
    policy: str
    importance: str
    rule: str
    codec: str
    budgeted: bool
    server: str


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
