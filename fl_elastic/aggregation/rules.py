"""The interface of rules that merge the deltas of a tensor, their registry, and the linear rules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fl_elastic.registry import Factories
from fl_elastic.update import PartialUpdate

Amount = float | NDArray[np.float64]
"""A sum of weights: one number, or one per element if clients trained parts of a tensor."""


class AggregationRule:
    """Merges the deltas of each tensor.

    Derive from `LinearRule`, `JointRule` or `RobustRule`. A linear rule merges parameters; running statistics are
    then averaged over the clients that updated them. A robust rule merges both.

    Attributes
    ----------
    draws_parts : bool
        Whether a client that trained a part of a tensor is assumed to have drawn the part at random, so that the
        ``probability`` passed to `weight` is multiplied by the part's share of the tensor.
    """

    draws_parts: ClassVar[bool] = False

    def weight(self, examples: float, probability: float) -> float:
        """Return the weight of a delta.

        Parameters
        ----------
        examples : float
            Weight of the client: its number of examples, or 1.
        probability : float
            Probability that the client trains this tensor in a round, in (0, 1].
        """
        del probability
        return examples


class LinearRule(AggregationRule, ABC):
    """Divides the sum of weighted deltas by a `divisor`; updates are merged one by one, in one model's memory."""

    @abstractmethod
    def divisor(self, contributed: Amount, total: float) -> Amount:
        """Return the divisor of one tensor's sum.

        Parameters
        ----------
        contributed : float or array
            Sum of the deltas' weights; an array if clients trained parts of the tensor.
        total : float
            Sum of the weights of all clients of the round, as if each had trained the tensor with certainty.
        """


class JointRule(LinearRule, ABC):
    """Merges some tensors jointly, such as the factors of a product, and all others as a linear rule does.

    Every update of the round is kept until its end, so memory grows with the number of clients.
    """

    @abstractmethod
    def together(
        self, base: Mapping[str, NDArray[Any]], updates: Sequence[tuple[PartialUpdate, float]]
    ) -> dict[str, NDArray[np.float64]]:
        """Return the merged deltas of the tensors that are merged jointly.

        Parameters
        ----------
        base : dict of str to ndarray
            The model that the deltas start from; not to be modified.
        updates : sequence of (PartialUpdate, float)
            Updates of the round, each with its client's weight.
        """


class RobustRule(AggregationRule, ABC):
    """Merges all deltas of a tensor together, so that a few bad ones cannot control the result.

    Every update of the round is kept until its end, so memory grows with the number of clients. The rule is only
    applied to elements with a quorum: enough contributors that more of them are honest than bad, as long as no more
    clients are bad than `MergeOptions` assumes.
    """

    @abstractmethod
    def combine(
        self, deltas: NDArray[np.float64], weights: NDArray[np.float64], bad: int = 0
    ) -> NDArray[np.float64]:
        """Return the merged delta of one tensor.

        Parameters
        ----------
        deltas : array, shape (clients, elements)
            Deltas of the clients that trained the tensor; NaN in elements that a client did not train, never in a
            whole column.
        weights : array, shape (clients,)
            Positive, and not derived from the clients' claims.
        bad : int
            Number of clients that may be bad.
        """

    def chosen(
        self, updates: Sequence[PartialUpdate], names: Sequence[str], bad: int = 0
    ) -> list[int]:
        """Return the indices of the updates that are merged: all of them, unless overridden.

        Parameters
        ----------
        updates : sequence of PartialUpdate
            Updates of the round.
        names : sequence of str
            Tensors that have a quorum.
        bad : int
            Number of clients that may be bad.
        """
        return list(range(len(updates)))


_ROBUST = ("median", "trimmed_mean", "norm_clipping", "krum")
RULES: Factories[AggregationRule] = Factories(
    "aggregation rule",
    modules={
        **dict.fromkeys(_ROBUST, "fl_elastic.aggregation.robust"),
        "products": "fl_elastic.aggregation.products",
    },
)
"""Registry of aggregation rules by name."""


@RULES.register("contributors")
class Contributors(LinearRule):
    """Mean over the clients that trained the tensor: full-size steps (HeteroFL, FedEL)."""

    def divisor(self, contributed: Amount, total: float) -> Amount:
        """Return the contributors' weight."""
        return contributed


@RULES.register("all")
class AllClients(LinearRule):
    """Mean over all clients, where a client that did not train the tensor counts as unchanged (damped steps)."""

    def divisor(self, contributed: Amount, total: float) -> Amount:
        """Return the weight of all clients."""
        return total


@RULES.register("inverse_probability")
class InverseProbability(LinearRule):
    r"""Weights each delta by one over the probability that the client trains the tensor.

    :math:`\Delta_k = \sum_{S_k} (n_i / p_{ik}) \Delta_{ik} / \max(\sum_{S_k} n_i / p_{ik}, \sum_i n_i)`: the
    Horvitz-Thompson estimate of the change by all clients, except that the step is never longer than the
    contributors' weighted mean. Probabilities below the floor count as the floor, which trades some bias for less
    variance.

    Attributes
    ----------
    floor : float
        Least probability that is used.
    """

    floor: ClassVar[float] = 0.2

    def weight(self, examples: float, probability: float) -> float:
        """Return the examples over the probability."""
        return examples / max(probability, self.floor)

    def divisor(self, contributed: Amount, total: float) -> Amount:
        """Return the larger of the weighted contributions and the weight of all clients."""
        return (
            np.maximum(contributed, total)
            if isinstance(contributed, np.ndarray)
            else max(contributed, total)
        )


@RULES.register("inverse_share")
class InverseShare(InverseProbability):
    """Weights each delta like ``inverse_probability``, times one over the share of the tensor that was trained.

    For clients that train windows of channels, drawn so that each channel is equally likely: the share that a
    client trained is then the probability of each channel, and the client need not report it. Over the rounds, a
    client with narrow windows has the same weight as a client that trains everything.
    """

    draws_parts = True
