"""Merge partial updates one by one, in memory that does not grow with the number of clients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fl_elastic.aggregation.rules import RULES, AggregationRule, JointRule, LinearRule, RobustRule
from fl_elastic.aggregation.sums import Addend, FlatSum, TensorSum, believed_steps, joined
from fl_elastic.errors import RegistryError, UpdateError
from fl_elastic.update import Manifest, PartialUpdate
from fl_elastic.update.manifest import Role, is_variance
from fl_elastic.update.partial import Limits, PackedDeltas, check_update, reach, trained_part

__all__ = ["MergeOptions", "PartialMean"]

_Merged = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class MergeOptions:
    """Settings of `PartialMean` beyond its rule.

    Parameters
    ----------
    weighting : {"examples", "uniform"}
        Whether a client counts by its examples, as in FedAvg, or each the same, as in HeteroFL and FedEL.
    normalise_steps : bool
        Divide each delta by the local steps in which its tensor was trained (FedNova, per tensor), so that a
        client that took more steps does not pull the model to its own optimum.
    late : {"drop", "merge"}
        What becomes of an update that arrives in a later round: dropped, or merged with less weight, where the
        client has sent none of that round.
    staleness_power : float
        A delta that is s rounds late counts by the factor (1 + s) to the power of minus this (FedAsync, Xie et al.
        2019); 0 counts it in full.
    bad_share : float
        Share of a round's clients, at least one of them, that robust rules take for bad; below a half. A tensor
        moves only if more of those who trained it are good than may be bad: two of ten need five contributors.
        0 for none.
    size_bound : float
        `PartialUpdates` shortens a client's change of a tensor to so many times what clients usually change it
        (`UpdateNormClipper`); infinite for no bound.
    extrapolate : bool
        Whether a server's optimiser may take a model with running statistics further than its clients went.
        Statistics are not taken along, so that a longer step leaves them behind.

    Raises
    ------
    RegistryError
        If the weighting is unknown or the power is negative.
    """

    weighting: Literal["examples", "uniform"] = "examples"
    normalise_steps: bool = False
    late: Literal["drop", "merge"] = "drop"
    staleness_power: float = 0.5
    bad_share: float = 0.2
    size_bound: float = 30.0
    extrapolate: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.bad_share < 0.5:
            raise RegistryError(f"bad_share {self.bad_share} must be from 0 to below a half")
        if not self.size_bound >= 1:
            raise RegistryError(f"size_bound {self.size_bound} must be at least 1")
        if self.weighting not in ("examples", "uniform"):
            raise RegistryError(f"weighting {self.weighting!r}: known are examples, uniform")
        if self.late not in ("drop", "merge"):
            raise RegistryError(f"late {self.late!r}: known are drop, merge")
        if not 0 <= self.staleness_power < float("inf"):
            raise RegistryError(f"staleness_power {self.staleness_power} must not be negative")

    def client_weight(self, num_examples: int, staleness: int) -> float:
        """Return what a client counts, before its probability of training a tensor."""
        examples = float(num_examples) if self.weighting == "examples" else 1.0
        return float(examples * (1.0 + staleness) ** -self.staleness_power)

    def bad_of(self, clients: int) -> int:
        """Return how many of so many clients are taken for bad.

        Examples
        --------
        >>> [MergeOptions().bad_of(clients) for clients in (1, 9, 10, 20)]
        [1, 1, 2, 4]
        """
        return max(int(self.bad_share * clients + 1e-9), 1) if self.bad_share else 0


class PartialMean:
    r"""Weighted mean of deltas per tensor, added to the base.

    :math:`w_k \leftarrow w_k + \sum_{i \in S_k} n_i \Delta_{ik} / D_k`, with the clients :math:`S_k` that trained
    tensor k, their example counts, and a divisor by rule. With every tensor from every client, in as many steps,
    all linear rules are FedAvg. Where a client trained some channels of a tensor, it counts in those alone.
    Under a linear rule running statistics are averaged over those who updated them: a zero change is no
    observation. Under a robust one they are merged as parameters are, and a tensor stays unless a quorum of clients
    trained it. A running variance never becomes negative. Integer buffers keep the base's value.

    Parameters
    ----------
    manifest : Manifest
        Of the global model.
    rule : str or AggregationRule
        A registered name, or an object; a robust or joint one keeps every update until `finish`.
    limits : Limits, optional
        What counts the server believes.
    options : MergeOptions, optional
        Weights, step normalisation, staleness.

    Attributes
    ----------
    stayed : dict of str to int
        After `finish`: tensors that too few clients trained for a robust rule, and how many did.

    Examples
    --------
    >>> manifest = Manifest(("w",), ((1,),), ("float32",), (Role.PARAMETER,))
    >>> mean = PartialMean(manifest)
    >>> mean.add(PartialUpdate({"w": np.array([1.0])}, {"w": 1}, num_examples=1))
    >>> mean.add(PartialUpdate({}, {}, num_examples=3))
    >>> mean.finish({"w": np.array([10.0], np.float32)})["w"].tolist()
    [11.0]
    """

    def __init__(
        self,
        manifest: Manifest,
        rule: str | AggregationRule = "contributors",
        *,
        limits: Limits | None = None,
        options: MergeOptions | None = None,
    ) -> None:
        self.manifest = manifest
        self.options = options or MergeOptions()
        self.clients = 0
        self.stayed: dict[str, int] = {}
        self._rule = RULES.make(rule)
        self._limits = limits
        self._flat = FlatSum(manifest)
        self._sums: dict[str, TensorSum] = {}
        self._kept: list[tuple[PartialUpdate, float]] = []
        self._total = 0.0

    @property
    def touched(self) -> frozenset[str]:
        """Names of the tensors that some client trained or observed; after `finish` of those that could move."""
        kept = {name for update, _ in self._kept for name in update.deltas}
        return frozenset(self._sums) | (kept - self.stayed.keys())

    def memory(self, size: int) -> NDArray[np.float32]:
        """Return an array for the numbers of one update, which may be written over once `add` has them.

        See `fl_elastic.update.decode`. Rules that keep updates are given new arrays.
        """
        if isinstance(self._rule, (RobustRule, JointRule)):
            return np.empty(size, np.float32)
        return self._flat.memory(size)

    def add(
        self,
        update: PartialUpdate,
        *,
        probabilities: Mapping[str, float] | None = None,
        staleness: int = 0,
        checked: bool = False,
    ) -> None:
        """Merge one update.

        Parameters
        ----------
        update : PartialUpdate
            From one client.
        probabilities : dict of str to float, optional
            With which the client trains each tensor; 1 for those left out.
        staleness : int
            How many rounds the update is late.
        checked : bool
            Whether it is known to fit, as what `fl_elastic.update.decode` returns under the same limits does.

        Raises
        ------
        UpdateError
            If it does not fit; the sums are then as they were.
        """
        if not checked:
            check_update(update, self.manifest, self._limits)
        weight = self.options.client_weight(update.num_examples, staleness)
        if isinstance(self._rule, RobustRule):
            # How many examples it has is what a client says.
            self._kept.append((update, self.options.client_weight(1, staleness)))
        else:
            if isinstance(self._rule, JointRule):
                self._kept.append((update, weight))
            addends = self._addends(update, weight, probabilities or {})
            # What was decoded has memory of its own, or was given away.
            self._flat.add(joined(addends), waits=isinstance(update.deltas, PackedDeltas))
        self._total += weight
        self.clients += 1

    def _addends(
        self, update: PartialUpdate, weight: float, probabilities: Mapping[str, float]
    ) -> list[Addend]:
        """Count the update's tensors, and return what is to be added to the sums."""
        packed = update.deltas if isinstance(update.deltas, PackedDeltas) else None
        addends = []
        for name, delta in update.deltas.items():
            parameter = self.manifest.role(name) is Role.PARAMETER
            probability = probabilities.get(name, 1.0) if parameter else 1.0
            summed = self._sums.get(name)
            if summed is None:
                normalise = parameter and self.options.normalise_steps
                summed = self._sums[name] = TensorSum(normalise_steps=normalise)
            part = trained_part(update, name)
            if self._rule.draws_parts and part is not None and parameter:
                probability *= float(part.mean())
            factor = summed.add(self._rule.weight(weight, probability), update.steps[name], part)
            start = None if packed is None else packed.start(name)
            if packed is None or start is None:
                numbers, start = np.ascontiguousarray(delta).reshape(-1), 0
            else:
                numbers = packed.flat
            to = self._flat.places[name]
            addends.append(Addend(numbers, start, to, int(np.size(delta)), factor))
        return addends

    def finish(self, base: Mapping[str, NDArray[Any]]) -> _Merged:
        """Return the new global model: every tensor of the manifest, in its dtype.

        Parameters
        ----------
        base : dict of str to ndarray
            The model that the deltas start from; not modified.

        Raises
        ------
        UpdateError
            If ``base`` does not fit the manifest, or the sum is beyond the tensor's dtype.
        """
        self.manifest.check_weights(base)
        combined = self._combined(base)
        # One tensor after the other: the merged deltas of the whole model would be two models more of memory.
        return {
            name: _moved(
                name, base[name], self._delta(name, combined), self.manifest.array_dtype(name)
            )
            for name in self.manifest.names
        }

    def _delta(
        self, name: str, combined: Mapping[str, NDArray[np.float64]]
    ) -> NDArray[np.float64] | None:
        """Return the merged delta of one tensor; None if nobody trained it."""
        summed = self._sums.get(name)
        if name in combined or summed is None:
            return combined.get(name)
        parameter = self.manifest.role(name) is Role.PARAMETER
        rule = self._rule if parameter and isinstance(self._rule, LinearRule) else None
        return summed.mean(self._flat.of(name), rule, self._total)

    def _combined(self, base: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[np.float64]]:
        """Return the deltas by a rule that looks at all updates of the round."""
        if isinstance(self._rule, JointRule):
            return self._rule.together(base, self._kept)
        return self._robust(self._rule) if isinstance(self._rule, RobustRule) else {}

    def _robust(self, rule: RobustRule) -> dict[str, NDArray[np.float64]]:
        """Return the deltas by a rule that looks at all of them, of the tensors that have a quorum."""
        bad = self.options.bad_of(len(self._kept))
        trainers = {
            name: [index for index, (update, _) in enumerate(self._kept) if name in update.deltas]
            for name in self.manifest.names
        }
        quorum = 2 * bad + 1
        self.stayed = {n: len(those) for n, those in trainers.items() if 0 < len(those) < quorum}
        names = [name for name, those in trainers.items() if len(those) >= quorum]
        chosen = set(rule.chosen([update for update, _ in self._kept], names, bad))
        combined = {}
        for name in names:
            everybody = np.stack([self._marked(index, name).ravel() for index in trainers[name]])
            enough = np.count_nonzero(~np.isnan(everybody), axis=0) >= quorum
            those = [row for row, index in enumerate(trainers[name]) if index in chosen]
            if not those or not enough.any():
                self.stayed[name] = len(trainers[name])
                continue
            weights = np.array([self._kept[trainers[name][row]][1] for row in those])
            merged = np.zeros(everybody.shape[1])
            merged[enough] = rule.combine(everybody[those][:, enough], weights, bad)
            combined[name] = merged.reshape(self.manifest.shape(name))
        return combined

    def _marked(self, index: int, name: str) -> NDArray[np.float64]:
        """Return the delta, per step where steps are normalised, with NaN where the client did not train."""
        update = self._kept[index][0]
        delta = np.asarray(update.deltas[name], dtype=np.float64)
        if self.options.normalise_steps and self.manifest.role(name) is Role.PARAMETER:
            usual = median(each.steps[name] for each, _ in self._kept if name in each.steps)
            delta = delta * (usual / believed_steps(update.steps[name], usual))
        part = trained_part(update, name)
        return delta if part is None else np.where(part, delta, np.nan)


def _moved(
    name: str, base: NDArray[Any], delta: NDArray[np.float64] | None, dtype: np.dtype[Any]
) -> NDArray[Any]:
    if delta is None:
        return np.array(base, dtype=dtype)
    with np.errstate(over="ignore"):
        new = np.asarray(np.add(base, delta, dtype=np.float64)).astype(dtype)
    if is_variance(name):
        # Also what rounding on the wire, or an update that came late, takes below.
        new = np.maximum(new, 0, dtype=dtype)
    if not math.isfinite(reach(new)):
        raise UpdateError(f"merged tensor {name!r} is beyond the range of {dtype}")
    return new
