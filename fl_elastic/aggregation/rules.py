"""How the deltas of one tensor become one: the interface of rules, their registry, and the plain ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fl_elastic.registry import Factories
from fl_elastic.update import PartialUpdate

__all__ = ["RULES", "AggregationRule", "Amount", "JointRule", "LinearRule", "RobustRule"]

Amount = float | NDArray[np.float64]
"""A sum of weights: one number, or one per element where clients trained parts of a tensor."""


class AggregationRule:
    """Merges the deltas of each tensor.

    Derive from `LinearRule`, `JointRule` or `RobustRule`. A linear rule merges parameters; running statistics are
    then averaged over those who updated them. A robust rule merges both.

    Attributes
    ----------
    draws_parts : bool
        Whether a client that trained a part of a tensor is taken to have drawn it, so that the part's share of the
        tensor is a factor of the probability.
    """

    draws_parts: ClassVar[bool] = False

    def weight(self, examples: float, probability: float) -> float:
        """Return the weight of a delta.

        Parameters
        ----------
        examples : float
            Weight of the client: its number of examples, or 1.
        probability : float
            With which the client trains this tensor in a round, in (0, 1].
        """
        del probability
        return examples


class LinearRule(AggregationRule, ABC):
    """Divides the sum of weighted deltas: merged one by one, in the memory of one model."""

    @abstractmethod
    def divisor(self, contributed: Amount, total: float) -> Amount:
        """Return the divisor of one tensor's sum.

        Parameters
        ----------
        contributed : float or array
            Sum of the deltas' weights; an array where clients trained parts of the tensor.
        total : float
            Sum of the weights of all clients of the round, as if each had trained the tensor for certain.
        """


class JointRule(LinearRule, ABC):
    """Merges some tensors together, such as the factors of a product, and all others as a linear rule does.

    Every update of the round is kept until its end: memory grows with the number of clients.
    """

    @abstractmethod
    def together(
        self, base: Mapping[str, NDArray[Any]], updates: Sequence[tuple[PartialUpdate, float]]
    ) -> dict[str, NDArray[np.float64]]:
        """Return the merged deltas of those tensors.

        Parameters
        ----------
        base : dict of str to ndarray
            The model that the deltas start from; not to be modified.
        updates : sequence of (PartialUpdate, float)
            Of the round, each with its client's weight.
        """


class RobustRule(AggregationRule, ABC):
    """Looks at all deltas of a tensor together, so that a few bad ones cannot decide.

    Every update of the round is kept until its end: memory grows with the number of clients. It is asked about
    elements that have a quorum only: more honest contributors than bad ones, if no more clients are bad than
    `MergeOptions` assumes.
    """

    @abstractmethod
    def combine(
        self, deltas: NDArray[np.float64], weights: NDArray[np.float64], bad: int = 0
    ) -> NDArray[np.float64]:
        """Return the merged delta of one tensor.

        Parameters
        ----------
        deltas : array, shape (clients, elements)
            Of the clients that trained the tensor; NaN in elements that a client did not train, never in a whole
            column.
        weights : array, shape (clients,)
            Positive, and not what clients say of themselves.
        bad : int
            How many of the clients may be bad.
        """

    def chosen(
        self, updates: Sequence[PartialUpdate], names: Sequence[str], bad: int = 0
    ) -> list[int]:
        """Return the indices of the updates that are merged at all: every one, unless overridden.

        Parameters
        ----------
        updates : sequence of PartialUpdate
            Of the round.
        names : sequence of str
            Tensors that have a quorum.
        bad : int
            How many of the clients may be bad.
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
"""Aggregation rules by name."""


@RULES.register("contributors")
class Contributors(LinearRule):
    """Mean over the clients that trained the tensor: full-size steps (HeteroFL, FedEL)."""

    def divisor(self, contributed: Amount, total: float) -> Amount:
        """Return the contributors' weight."""
        return contributed


@RULES.register("all")
class AllClients(LinearRule):
    """Mean over all clients, those that did not train the tensor counting as unchanged: damped, as in FedAvg."""

    def divisor(self, contributed: Amount, total: float) -> Amount:
        """Return the weight of all clients."""
        return total


@RULES.register("inverse_probability")
class InverseProbability(LinearRule):
    r"""Weigh each delta by one over the probability with which the client trains the tensor.

    :math:`\Delta_k = \sum_{S_k} (n_i / p_{ik}) \Delta_{ik} / \max(\sum_{S_k} n_i / p_{ik}, \sum_i n_i)`: the
    Horvitz-Thompson estimate of what all clients would have changed, except that the step is never longer than
    the contributors' weighted mean. Probabilities below the floor count as the floor, which trades some bias
    for less variance.

    Attributes
    ----------
    floor : float
        Least probability believed.
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
    """Weigh each delta as ``inverse_probability`` does, and by one over the share of the tensor that was trained.

    For clients that train windows of channels which are drawn so that each channel is held equally often: the part
    that came tells with which probability it did, and nobody has to claim it. A client with narrow windows, whose
    channels come seldom, then counts over the rounds as one that trains everything.
    """

    draws_parts = True
