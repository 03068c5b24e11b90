"""Merge partial updates one by one, in memory that does not grow with the number of clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.aggregation.rules import make_rule
from fl_elastic.errors import UpdateError
from fl_elastic.update import Limits, Manifest, PartialUpdate, Role, check_update

__all__ = ["PartialMean"]


class PartialMean:
    r"""Weighted mean of deltas per tensor, added to the base.

    :math:`w_k \leftarrow w_k + \sum_{i \in S_k} n_i \Delta_{ik} / D_k`, with the clients :math:`S_k` that trained
    tensor k, their example counts, and a divisor by rule. With every tensor from every client all rules are FedAvg.
    Running statistics are always averaged over those who updated them, whatever the rule: a zero
    change is no observation. Integer buffers keep the base's value.

    Parameters
    ----------
    manifest : Manifest
        Of the global model.
    rule : str
        Registered rule: ``contributors`` or ``all``.
    limits : Limits, optional
        What counts the server believes.

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
        self, manifest: Manifest, rule: str = "contributors", *, limits: Limits | None = None
    ) -> None:
        self.manifest = manifest
        self._rule = make_rule(rule)
        self._limits = limits
        self._sums: dict[str, NDArray[np.float64]] = {}
        self._contributed: dict[str, float] = {}
        self._total = 0.0
        self.clients = 0

    def add(self, update: PartialUpdate) -> None:
        """Merge one update; raises UpdateError, leaving the sums as they were, if it does not fit."""
        check_update(update, self.manifest, self._limits)
        weight = float(update.num_examples)
        for name, delta in update.deltas.items():
            if name not in self._sums:
                self._sums[name] = np.zeros(self.manifest.shape(name))
                self._contributed[name] = 0.0
            self._sums[name] += weight * np.asarray(delta, dtype=np.float64)
            self._contributed[name] += weight
        self._total += weight
        self.clients += 1

    def finish(self, base: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
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
        merged: dict[str, NDArray[Any]] = {}
        for name, role in zip(self.manifest.names, self.manifest.roles, strict=True):
            dtype = self.manifest.array_dtype(name)
            if name not in self._sums:
                merged[name] = np.array(base[name], dtype=dtype)
                continue
            contributed = self._contributed[name]
            divisor = (
                contributed
                if role is Role.STATISTIC
                else self._rule.divisor(contributed, self._total)
            )
            with np.errstate(over="ignore"):
                new = (np.asarray(base[name], np.float64) + self._sums[name] / divisor).astype(
                    dtype
                )
            if not np.isfinite(new).all():
                raise UpdateError(f"merged tensor {name!r} is beyond the range of {dtype}")
            # numpy turns a sum of tensors without dimensions into a bare number.
            merged[name] = np.asarray(new)
        return merged
