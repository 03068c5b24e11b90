"""Merge partial updates one by one, in memory that does not grow with the number of clients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fl_elastic.aggregation.rules import RULES, AggregationRule, JointRule, LinearRule, RobustRule
from fl_elastic.aggregation.sums import Addend, FlatSum, TensorSum, believed_steps, joined
from fl_elastic.errors import SettingError, UpdateError
from fl_elastic.update import Manifest, PartialUpdate
from fl_elastic.update.checks import Limits, check_update
from fl_elastic.update.manifest import Role, WeightDict, is_variance
from fl_elastic.update.partial import PackedDeltas, reach, trained_part


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
        How an update that arrives in a later round is treated: it is dropped, or merged with less weight unless the
        client has sent another update in that round.
    staleness_power : float
        A delta that is s rounds late is weighted by (1 + s) to the power of minus this (FedAsync, Xie et al. 2019);
        0 gives it full weight, and 1 gives half the weight to a delta that is one round late.
    bad_share : float
        Share of a round's clients, but at least one client, that robust rules assume to be bad; below one half. A
        tensor changes only if more good clients than possibly bad ones trained it: if two of ten may be bad, five
        contributors are needed. 0 means that no client is bad.
    size_bound : float
        `PartialUpdates` shortens a client's change of a tensor to this multiple of the usual change
        (`ChangeClipper`); infinite for no bound.

    Raises
    ------
    SettingError
        If a name is unknown or a number is out of range.
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


class PartialMean:
    r"""Weighted mean of deltas per tensor, added to the base.

    :math:`w_k \leftarrow w_k + \sum_{i \in S_k} n_i \Delta_{ik} / D_k`, with the clients :math:`S_k` that trained
    tensor k, their example counts, and a divisor that depends on the rule. If every client trains every tensor in
    equally many steps, all linear rules equal FedAvg. A client that trained some channels of a tensor counts only
    in these. Under a linear rule running statistics are averaged over the clients that updated them, because a
    client that did not update them has observed nothing. Under a robust rule they are merged like parameters, and a
    tensor is unchanged unless a quorum of clients trained it. A running variance never becomes negative. Integer
    buffers keep the base's value.

    Parameters
    ----------
    manifest : Manifest
        Manifest of the global model.
    rule : str or AggregationRule
        A registered name, or an object; a robust or joint rule keeps every update until `finish`.
    limits : Limits, optional
        Bounds of the numbers that the server accepts.
    options : MergeOptions, optional
        Weights, step normalisation, staleness.

    Attributes
    ----------
    stayed : dict of str to int
        Tensors that a robust rule left unchanged because too few clients trained them, with the number of these
        clients; filled by `finish`.

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
        """Names of tensors that some client trained or updated; after `finish`, of those that could change."""
        kept = {name for update, _ in self._kept for name in update.deltas}
        return frozenset(self._sums) | (kept - self.stayed.keys())

    def memory(self, size: int) -> NDArray[np.float32]:
        """Return an array for the numbers of one update; it is reused after `add` has added them.

        See `fl_elastic.update.decode`. Rules that keep updates get new arrays.
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
            Probabilities with which the client trains each tensor; 1 for missing names.
        staleness : int
            Number of rounds by which the update is late.
        checked : bool
            Whether the update is already known to be valid, for example because `fl_elastic.update.decode` checked
            it with the same limits.

        Raises
        ------
        UpdateError
            If the update does not fit the manifest; the sums are then unchanged.
        """
        if not checked:
            check_update(update, self.manifest, self._limits)
        weight = self.options.client_weight(update.num_examples, staleness)
        if isinstance(self._rule, RobustRule):
            # The number of examples is a claim of the client, so it is not used.
            self._kept.append((update, self.options.client_weight(1, staleness)))
        else:
            if isinstance(self._rule, JointRule):
                self._kept.append((update, weight))
            addends = self._addends(update, weight, probabilities or {})
            # A decoded update owns its memory, or has it from `memory`.
            self._flat.add(joined(addends), waits=isinstance(update.deltas, PackedDeltas))
        self._total += weight
        self.clients += 1

    def _addends(
        self, update: PartialUpdate, weight: float, probabilities: Mapping[str, float]
    ) -> list[Addend]:
        """Count the update's tensors, and return the addends for the sums."""
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

    def finish(self, base: Mapping[str, NDArray[Any]]) -> WeightDict:
        """Return the new global model: every tensor of the manifest, in its dtype.

        Parameters
        ----------
        base : dict of str to ndarray
            The model that the deltas start from; not modified.

        Raises
        ------
        UpdateError
            If ``base`` does not fit the manifest, or a sum is out of the tensor's dtype range.
        """
        self.manifest.check_weights(base)
        combined = self._combined(base)
        # Process one tensor at a time: merged deltas of the whole model would take the memory of two more models.
        return {
            name: _moved(
                name, base[name], self._delta(name, combined), self.manifest.array_dtype(name)
            )
            for name in self.manifest.names
        }

    def _delta(
        self, name: str, combined: Mapping[str, NDArray[np.float64]]
    ) -> NDArray[np.float64] | None:
        """Return the merged delta of one tensor; None if no client trained it."""
        summed = self._sums.get(name)
        if name in combined or summed is None:
            return combined.get(name)
        parameter = self.manifest.role(name) is Role.PARAMETER
        rule = self._rule if parameter and isinstance(self._rule, LinearRule) else None
        return summed.mean(self._flat.of(name), rule, self._total)

    def _combined(self, base: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[np.float64]]:
        """Return the deltas of a rule that needs all updates of the round."""
        if isinstance(self._rule, JointRule):
            return self._rule.together(
                base, [(self._normalised(update), w) for update, w in self._kept]
            )
        return self._robust(self._rule) if isinstance(self._rule, RobustRule) else {}

    def _normalised(self, update: PartialUpdate) -> PartialUpdate:
        """Return the update, rescaled to the mean number of steps if steps are normalised."""
        if not self.options.normalise_steps:
            return update
        deltas = {
            name: delta * (self._sums[name].mean_steps / update.steps[name])
            if self.manifest.role(name) is Role.PARAMETER
            else delta
            for name, delta in update.deltas.items()
        }
        return replace(update, deltas=deltas)

    def _robust(self, rule: RobustRule) -> dict[str, NDArray[np.float64]]:
        """Return the deltas of a robust rule, for the tensors that have a quorum."""
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
        """Return the delta, optionally per step, with NaN where the client did not train."""
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
        # Rounding by a codec, or a late update, can also make a running variance negative.
        new = np.maximum(new, 0, dtype=dtype)
    if not math.isfinite(reach(new)):
        raise UpdateError(f"merged tensor {name!r} is beyond the range of {dtype}")
    return new
