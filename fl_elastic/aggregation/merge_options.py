"""How much each client counts in a round: by its examples, its steps, and how late it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fl_elastic.errors import SettingError


@dataclass(frozen=True)
class MergeOptions:
    """Settings of `PartialMean` beyond its rule.

    Parameters
    ----------
    weighting : {"examples", "uniform"}
        Whether a client is weighted by its examples, as in FedAvg, or equally, as in HeteroFL and FedEL.
    normalise_steps : bool
        Whether to divide each delta by the number of local steps of its tensor (FedNova, per tensor), so that a
        client with more steps does not pull the model to its own optimum.
    late : {"drop", "merge"}
        What happens to an update that arrives in a later round: it is dropped, or merged with less weight if the
        client has sent none in that round.
    staleness_power : float
        A delta that is s rounds late is weighted by (1 + s) to the power of minus this (FedAsync, Xie et al. 2019);
        0 gives it full weight.
    bad_share : float
        Share of a round's clients, at least one client, that robust rules assume to be bad; below one half. A
        tensor changes only if more good clients than possibly bad ones trained it: with two of ten bad, five
        contributors are needed. 0 assumes none.
    size_bound : float
        `PartialUpdates` shortens a client's change of a tensor to this multiple of the usual change
        (`ChangeClipper`); infinite for no bound.

    Raises
    ------
    SettingError
        If the weighting is unknown or the power is negative.
    """

    weighting: Literal["examples", "uniform"] = "examples"
    normalise_steps: bool = False
    late: Literal["drop", "merge"] = "drop"
    staleness_power: float = 0.5
    bad_share: float = 0.2
    size_bound: float = 30.0

    def __post_init__(self) -> None:
        if not 0 <= self.bad_share < 0.5:
            raise SettingError(f"bad_share {self.bad_share} must be from 0 to below a half")
        if not self.size_bound >= 1:
            raise SettingError(f"size_bound {self.size_bound} must be at least 1")
        if self.weighting not in ("examples", "uniform"):
            raise SettingError(f"weighting {self.weighting!r}: known are examples, uniform")
        if self.late not in ("drop", "merge"):
            raise SettingError(f"late {self.late!r}: known are drop, merge")
        if not 0 <= self.staleness_power < float("inf"):
            raise SettingError(f"staleness_power {self.staleness_power} must not be negative")

    def client_weight(self, num_examples: int, staleness: int) -> float:
        """Return the weight of a client, without the probability of training a tensor."""
        examples = float(num_examples) if self.weighting == "examples" else 1.0
        return float(examples * (1.0 + staleness) ** -self.staleness_power)

    def bad_of(self, clients: int) -> int:
        """Return how many of ``clients`` clients are assumed to be bad.

        Examples
        --------
        >>> [MergeOptions().bad_of(clients) for clients in (1, 9, 10, 20)]
        [1, 1, 2, 4]
        """
        return max(int(self.bad_share * clients + 1e-9), 1) if self.bad_share else 0
