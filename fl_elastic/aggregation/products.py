"""Merge low-rank adapters by their products instead of factor by factor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.aggregation.rules import RULES, Amount, JointRule
from fl_elastic.update import PartialUpdate

_Array = NDArray[np.float64]
_A = re.compile(r"lora_(embedding_)?A")
# Singular values below this share of the largest one are rounding errors.
_NOTHING = 1e-12

Factors = tuple[_Array, _Array]
"""B of shape (outputs, rank) and A of shape (rank, inputs), whose product B A is added to a frozen weight."""


@RULES.register("products")
class Products(JointRule):
    r"""Mean of the products B A over the clients that trained one or both factors, at the rank of the model.

    Averaging the two factors of an adapter separately has an error: their covariance over the clients. This rule
    multiplies each client's factors as they were after its training, averages the products by the contributors'
    weights, and takes the nearest product of the model's rank by a singular value decomposition, as FlexLoRA does
    (Bai et al., NeurIPS 2024). The merged A has orthogonal rows, with the root mean square of the lengths of
    clients' rows, the most important one first. If a client trained only some rows of A and columns of B, its
    others are those of the model sent to it.

    Pairs are found by name, ``lora_A`` beside ``lora_B``, as in peft. Every other tensor is averaged over the
    clients that trained it. The result is exact if the rank of the mean product does not exceed the model's;
    otherwise the smallest components are lost. Updates are kept until the end of the round, so memory grows with
    the number of clients.

    Examples
    --------
    >>> base = {"lora_B": np.zeros((2, 1)), "lora_A": np.ones((1, 2))}
    >>> trained = [{"lora_B": np.ones((2, 1)), "lora_A": np.ones((1, 2))}, {"lora_B": np.ones((2, 1))}]
    >>> updates = [(PartialUpdate(each, dict.fromkeys(each, 1), num_examples=1), 1.0) for each in trained]
    >>> new = {name: base[name] + delta for name, delta in Products().together(base, updates).items()}
    >>> (new["lora_B"] @ new["lora_A"]).round(3).tolist()
    [[1.5, 1.5], [1.5, 1.5]]
    """

    def divisor(self, contributed: Amount, total: float) -> Amount:
        """Return the contributors' weight, for tensors that are not factors of an adapter."""
        return contributed

    def together(
        self, base: Mapping[str, NDArray[Any]], updates: Sequence[tuple[PartialUpdate, float]]
    ) -> dict[str, _Array]:
        """Return the change of both factors of each adapter that some client trained."""
        merged: dict[str, _Array] = {}
        for name_b, name_a in factor_pairs(base):
            trained = [each for each in updates if {name_a, name_b} & each[0].deltas.keys()]
            if not trained:
                continue
            whole = sum(weight for _, weight in trained)
            held = [self.held(base, update, name_b, name_a) for update, _ in trained]
            weights = [weight / whole for _, weight in trained]
            # Mean over each client's rows, however many it has.
            square = sum(
                w * float(np.mean(np.sum(a**2, 1))) for w, (_, a) in zip(weights, held, strict=True)
            )
            b, a = nearest_factors(
                *sum_of_products(weights, held), len(base[name_a]), float(np.sqrt(square))
            )
            merged[name_b] = b.reshape(base[name_b].shape) - base[name_b]
            merged[name_a] = a.reshape(base[name_a].shape) - base[name_a]
        return merged

    def held(
        self, base: Mapping[str, NDArray[Any]], update: PartialUpdate, name_b: str, name_a: str
    ) -> Factors:
        """Return both factors as the client had them after its training."""
        b, a = (
            np.asarray(base[name], np.float64) + np.asarray(update.deltas.get(name, 0.0))
            for name in (name_b, name_a)
        )
        # Factors of convolutions have further axes, of length 1 in B.
        return b.reshape(len(b), -1), a.reshape(len(a), -1)


def factor_pairs(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return the names of B and A of each adapter among these tensors.

    Examples
    --------
    >>> factor_pairs(["h.0.lora_A.weight", "h.0.lora_B.weight", "head.weight"])
    [('h.0.lora_B.weight', 'h.0.lora_A.weight')]
    """
    known = dict.fromkeys(names)
    pairs = [(_A.sub(r"lora_\1B", name), name) for name in known if _A.search(name)]
    return [(b, a) for b, a in pairs if b in known]


def sum_of_products(weights: Sequence[float], factors: Sequence[Factors]) -> Factors:
    """Stack factors, so that the product of the two stacks is the weighted sum of the products.

    Examples
    --------
    >>> one = np.array([[1.0], [0.0]]), np.array([[2.0, 0.0]])
    >>> b, a = sum_of_products([0.5, 0.25], [one, one])
    >>> (b @ a).tolist()
    [[1.5, 0.0], [0.0, 0.0]]
    """
    b = np.concatenate([w * held for w, (held, _) in zip(weights, factors, strict=True)], axis=1)
    return b, np.concatenate([held for _, held in factors])


def nearest_factors(b: _Array, a: _Array, rank: int, length: float) -> Factors:
    """Return factors of this rank whose product is nearest to ``b @ a``.

    Rows of A are orthogonal, each of length ``length`` (1 if that is 0), the most important one first. Directions
    beyond the rank of the product also get rows, with columns of zeros in B.

    Examples
    --------
    >>> b, a = nearest_factors(np.eye(3), np.diag([3.0, 2.0, 1.0]), rank=2, length=0.5)
    >>> np.abs(b @ a).round(3).tolist()
    [[3.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 0.0]]
    >>> np.linalg.norm(a, axis=1).round(3).tolist()
    [0.5, 0.5]
    """
    # The product is as large as the frozen weight, so only a small core is decomposed (QR of both stacks first).
    left, upper = np.linalg.qr(b)
    right, lower = np.linalg.qr(a.T)
    u, singular, v = np.linalg.svd(upper @ lower.T)
    rank_there = min(rank, len(singular))
    singular = np.where(singular > _NOTHING * max(singular[0], 1e-300), singular, 0.0)[:rank_there]
    length = length or 1.0
    new_b, new_a = np.zeros((len(b), rank)), np.zeros((rank, a.shape[1]))
    new_b[:, :rank_there] = left @ u[:, :rank_there] * (singular / length)
    new_a[: min(rank, len(v))] = length * (v @ right.T)[:rank]
    return new_b, new_a
