"""FlexLoRA: clients train adapters of different ranks, and the server averages the products of their factors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.aggregation.products import Factors, Products
from fl_elastic.update import PartialUpdate
from fl_elastic.update.partial import trained_part
from fl_elastic_simulations.peers.base import LocalResult, LocalTask, Peer, register_peer
from fl_elastic_simulations.peers.low_rank import train_at_rank

__all__ = ["CutProducts", "FlexLora"]


class CutProducts(Products):
    """The mean of products in which a client's product counts as zero beyond its rank."""

    def held(
        self, base: Mapping[str, NDArray[Any]], update: PartialUpdate, name_b: str, name_a: str
    ) -> Factors:
        """Return both factors of the client, without the ranks that it lacks."""
        b, a = super().held(base, update, name_b, name_a)
        part = trained_part(update, name_a) if name_a in update.deltas else None
        if part is None:
            return b, a
        kept = np.asarray(part).reshape(len(a), -1).any(axis=1)
        return b[:, kept], a[kept]


@register_peer("flex_lora")
class FlexLora(Peer):
    """Train as many ranks of every adapter as suit the device; the server averages products and decomposes them.

    FlexLoRA (Bai et al., NeurIPS 2024), "-style". Taken from the paper: clients of different ranks, the weighted
    mean of their products, and its singular value decomposition, of which each client gets as much as its rank
    holds. Assumed: the rank follows from the relative speed; the scale of the product is the same at every rank; A
    has the norm of the clients' A, which the decomposition leaves open. It takes as many steps as the time allows.
    """

    rule = CutProducts()

    def local_training(self, task: LocalTask) -> LocalResult:
        """Train the first ranks."""
        return train_at_rank(task, self.name)
