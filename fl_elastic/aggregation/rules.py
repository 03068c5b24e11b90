"""What the sum of weighted deltas of one tensor is divided by."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from fl_elastic.registry import Registry

__all__ = ["AggregationRule", "make_rule", "register_rule", "rules"]


class AggregationRule(ABC):
    """Turns the weights of the clients into the divisor of one tensor's delta sum."""

    @abstractmethod
    def divisor(self, contributed: float, total: float) -> float:
        """Return the divisor.

        Parameters
        ----------
        contributed : float
            Sum of the weights of the clients that trained the tensor, positive.
        total : float
            Sum of the weights of all clients of the round.
        """


_REGISTRY: Registry[type[AggregationRule]] = Registry("aggregation rule")
register_rule: Callable[[str], Callable[[type[AggregationRule]], type[AggregationRule]]] = (
    _REGISTRY.register
)


def rules() -> list[str]:
    """Return the names of the registered rules."""
    return _REGISTRY.names()


def make_rule(name: str) -> AggregationRule:
    """Return the rule registered as ``name``."""
    return _REGISTRY.get(name)()


@register_rule("contributors")
class Contributors(AggregationRule):
    """Mean over the clients that trained the tensor: full-size steps (HeteroFL, FedEL)."""

    def divisor(self, contributed: float, total: float) -> float:
        """Return the contributors' weight."""
        return contributed


@register_rule("all")
class AllClients(AggregationRule):
    """Mean over all clients, those that did not train the tensor counting as unchanged: damped, as in FedAvg."""

    def divisor(self, contributed: float, total: float) -> float:
        """Return the weight of all clients."""
        return total
