"""A server optimiser that goes further while rounds agree."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.aggregation.server_optimizers import SERVER_OPTIMIZERS, ServerOptimizer

__all__ = ["Agreement"]

_FACTOR = "factor"


@SERVER_OPTIMIZERS.register("agreement")
class Agreement(ServerOptimizer):
    r"""Goes where the clients ask for, and up to half as far again while rounds ask for the same.

    Early, and where all clients take part, the changes of successive rounds point the same way, and a longer
    step saves rounds; where each round pulls towards its own few clients, the next one takes back part of it, and
    a longer step would only swing wider. So the step is `rate` times a factor that follows the cosine of the last
    two changes, :math:`f \leftarrow \min(\max(f e^{0.2 (\cos + 0.25)}, 1), 1.5)`: the hypergradient of a learning
    rate (Baydin et al., ICLR 2018; for a federation's server Wang et al., FedHyper, ICLR 2024) without its
    scale, and bounded.

    The cosine is over the tensors that were trained now and before; the last change of each is kept, one
    model of memory in double precision.

    Examples
    --------
    >>> optimizer = Agreement()
    >>> base = {"w": np.zeros(1)}
    >>> for _ in range(3):
    ...     base = optimizer.step(base, {"w": base["w"] + 1.0}, {"w"})
    >>> round(float(base["w"][0]), 2)
    3.78
    """

    gain = 0.2
    """By what the factor grows with the cosine, as an exponent."""
    neutral = -0.25
    """The cosine that leaves the factor as it is; by trial: where longer steps pay, the early ones lie above it."""
    most = 1.5
    """The largest factor."""

    def moved(
        self,
        base: Mapping[str, NDArray[Any]],
        merged: Mapping[str, NDArray[Any]],
        touched: Collection[str],
    ) -> dict[str, NDArray[Any]]:
        """Return the new weights, by the factor that this round's change and the last one's give."""
        changes = {
            name: np.asarray(merged[name], np.float64) - np.asarray(old, np.float64)
            for name, old in base.items()
            if name in touched
        }
        self._moments[_FACTOR] = np.array(self._next_factor(changes))
        new = super().moved(base, merged, touched)
        self._moments.update({_key(name): change for name, change in changes.items()})
        return new

    def direction(self, name: str, change: NDArray[np.float64], count: int) -> NDArray[np.float64]:
        """Return the change, lengthened."""
        return self.factor * change

    @property
    def factor(self) -> float:
        """By how much steps are lengthened now."""
        return float(self._moments.get(_FACTOR, 1.0))

    def _next_factor(self, changes: Mapping[str, NDArray[np.float64]]) -> float:
        pairs = [
            (change, self._moments[_key(name)])
            for name, change in changes.items()
            if _key(name) in self._moments
        ]
        product, now, last = (
            sum(float(np.vdot(a, b)) for a, b in each)
            for each in (pairs, [(a, a) for a, _ in pairs], [(b, b) for _, b in pairs])
        )
        length = math.sqrt(now * last)
        if not 0 < length < math.inf:
            return self.factor
        grown = self.factor * math.exp(self.gain * (product / length - self.neutral))
        return min(max(grown, 1.0), self.most)


def _key(name: str) -> str:
    return f"last/{name}"
