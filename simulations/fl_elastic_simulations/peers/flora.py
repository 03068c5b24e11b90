"""Adapters of unequal rank, stacked, folded into the layers and begun anew in every round."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fl_elastic.aggregation import JointRule
from fl_elastic.aggregation.products import factor_pairs
from fl_elastic.aggregation.rules import Amount
from fl_elastic.groups import Batch, LossFn
from fl_elastic.update import PartialUpdate
from fl_elastic_simulations.models.adapters import low_rank_layers
from fl_elastic_simulations.peers.base import LocalResult, LocalTask, Peer, register_peer
from fl_elastic_simulations.peers.flex_lora import CutProducts
from fl_elastic_simulations.peers.low_rank import train_at_rank

__all__ = ["Flora", "FoldedStacks"]

_Array = NDArray[np.float64]


class FoldedStacks(JointRule):
    """Adds the weighted sum of all products to the layers; every adapter then begins anew: B at zero, A at random.

    Examples
    --------
    >>> base = {"lora_A.weight": np.ones((1, 2)), "lora_B.weight": np.zeros((2, 1)), "merged": np.zeros((2, 2))}
    >>> one = PartialUpdate({"lora_B.weight": np.ones((2, 1))}, {"lora_B.weight": 1}, num_examples=1)
    >>> FoldedStacks().together(base, [(one, 1.0)])["merged"].tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    """

    def divisor(self, contributed: Amount, total: float) -> Amount:
        """Return the contributors' weight, for tensors that are no factors."""
        return contributed

    def together(
        self, base: Mapping[str, NDArray[Any]], updates: Sequence[tuple[PartialUpdate, float]]
    ) -> dict[str, _Array]:
        """Return the change of both factors of each adapter, and of what is folded into its layer."""
        changed: dict[str, _Array] = {}
        products = CutProducts()
        for name_b, name_a in factor_pairs(base):
            trained = [each for each in updates if {name_a, name_b} & each[0].deltas.keys()]
            if not trained:
                continue
            whole = sum(weight for _, weight in trained)
            folded = np.zeros(base[_merged(name_b)].shape)
            for update, weight in trained:
                b, a = products.held(base, update, name_b, name_a)
                folded += weight / whole * (b @ a)
            old = np.asarray(base[name_a], np.float64)
            # By what was there before: the same run gives the same numbers.
            generator = np.random.default_rng([zlib.crc32(name_a.encode()), zlib.crc32(old.data)])
            bound = 1 / np.sqrt(old.shape[1])
            changed[_merged(name_b)] = folded
            changed[name_b] = -np.asarray(base[name_b], np.float64)
            changed[name_a] = generator.uniform(-bound, bound, old.shape) - old
        return changed


def _merged(name_b: str) -> str:
    return name_b.replace("lora_B.weight", "merged")


@register_peer("flora")
class Flora(Peer):
    """Train as many ranks of every adapter as suit the device; what all have trained is folded into the layers.

    FLoRA (Wang et al., NeurIPS 2024), "-style". From the paper: clients of unequal rank, whose weighted products
    are summed without an error, and adapters that begin anew in every round. Assumed: the rank follows from the
    relative speed. What comes down here is the sum of the products, as large as the layers; the paper's stacks of
    all clients' factors are smaller while all ranks together are below about half of a layer's width. Adding the
    sum to a layer's weight in every step is not charged.
    """

    rule = FoldedStacks()

    def prepare(self, model: nn.Module, loss_fn: LossFn, batch: Batch) -> nn.Module:
        """Return the model with a place for what is folded into each layer with an adapter."""
        del loss_fn, batch
        for layer in low_rank_layers(model).values():
            layer.add_merged()
        return model

    def local_training(self, task: LocalTask) -> LocalResult:
        """Train the first ranks."""
        return train_at_rank(task, self.name)
