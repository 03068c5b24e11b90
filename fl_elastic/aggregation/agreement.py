"""A server optimiser that takes longer steps while successive rounds have similar directions."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.aggregation.server_optimizers import SERVER_OPTIMIZERS, ServerOptimizer

_FACTOR = "factor"


@SERVER_OPTIMIZERS.register("agreement")
class Agreement(ServerOptimizer):
    r"""Steps along the clients' change, up to 1.5 times as far while successive rounds have similar directions.

    Early in a run, and if all clients take part, the changes of successive rounds have similar directions, and
    longer steps save rounds. If each round moves the model towards the few clients that took part, the next round
    reverses part of the change, and longer steps would only make the model oscillate more. So the step is `rate`
    times a factor that follows the cosine of the last two changes,
    :math:`f \leftarrow \min(\max(f e^{0.2 (\cos + 0.25)}, 1), 1.5)`. The update of the factor is the hypergradient
    of a learning rate (Baydin et al., ICLR 2018; for the server of a federation Wang et al., FedHyper, ICLR 2024)
    without its scale, and with bounds.

    The cosine is computed over the tensors that were trained both in this round and in an earlier one. The last
    change of each tensor is kept, which takes the memory of one model in double precision.

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
    """Growth of the factor with the cosine, in the exponent."""
    neutral = -0.25
    """Cosine that leaves the factor unchanged; found by trial: if longer steps pay, early cosines exceed it."""
    most = 1.5
    """The largest factor."""

    def moved(
        self,
        base: Mapping[str, NDArray[Any]],
        merged: Mapping[str, NDArray[Any]],
        touched: Collection[str],
    ) -> dict[str, NDArray[Any]]:
        """Return the new weights; the factor depends on the changes of this round and of the previous one."""
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
        """Return the lengthened change."""
        return self.factor * change

    @property
    def factor(self) -> float:
        """Factor by which steps are lengthened at present."""
        return float(self._moments.get(_FACTOR, 1.0))

    def _next_factor(self, changes: Mapping[str, NDArray[np.float64]]) -> float:
        pairs = [
            (change, self._moments[_key(name)])
            for name, change in changes.items()
            if _key(name) in self._moments
        ]
        product, now, last = (
            sum(float(np.vdot(a, b)) for a, b in sums)
            for sums in (pairs, [(a, a) for a, _ in pairs], [(b, b) for _, b in pairs])
        )
        length = math.sqrt(now * last)
        if not 0 < length < math.inf:
            return self.factor
        grown = self.factor * math.exp(self.gain * (product / length - self.neutral))
        return min(max(grown, 1.0), self.most)


def _key(name: str) -> str:
    return f"last/{name}"
