"""Find an update scheme for any model: contribution analysis, then an evolutionary search under a memory budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import BudgetError
from fl_elastic.groups import Mode
from fl_elastic.methods.sparse_update.conventions import LayerUpdate, tiny_training_bits
from fl_elastic.methods.sparse_update.policy import scheme_modes
from fl_elastic.methods.sparse_update.published_schemes import Scheme
from fl_elastic.planning.channel_modes import RATIOS, known_layers, trainable_layers
from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.layer_shapes import LayerShape

__all__ = [
    "Contributions",
    "SchemeCosts",
    "fit_contributions",
    "scheme_costs",
    "scheme_layers",
    "search_scheme",
]

_Floats = NDArray[np.float64]
_Genes = NDArray[np.intp]

# The paper names none of these.
_POPULATION = 128
_GENERATIONS = 80
_PARENTS = 32
_MUTATION = 0.08
_STEP = 3


@dataclass(frozen=True, eq=False)
class Contributions:
    """What each part of a scheme adds to the accuracy, of L layers counted from the input.

    Attributes
    ----------
    bias : array, shape (L + 1,)
        Training the biases of the last k layers besides the classifier.
    weights : array, shape (L, R)
        Training each share of each layer's input channels besides all biases.
    ratios : tuple of float
        The R shares.
    """

    bias: _Floats
    weights: _Floats
    ratios: tuple[float, ...] = RATIOS


@dataclass(frozen=True, eq=False)
class SchemeCosts:
    """Bytes of each part of a scheme; shapes as in `Contributions`."""

    bias: _Floats
    weights: _Floats


def scheme_layers(profile: CostProfile) -> list[LayerShape]:
    """Return the layers that a scheme speaks of, from the input; a layer of unknown shape costs nothing."""
    known = known_layers(profile)
    names = profile.group_names
    return [known.get(g, LayerShape(names[g], 0, 0)) for g in trainable_layers(profile)[::-1]]


def scheme_costs(layers: Sequence[LayerShape], ratios: Sequence[float] = RATIOS) -> SchemeCosts:
    """Return what each part costs by the rule of tiny-training, without the classifier's input."""
    each = [
        tiny_training_bits([la], [LayerUpdate(0.0, bias=True)], 0) / 8 for la in reversed(layers)
    ]
    shares = [[tiny_training_bits([la], [LayerUpdate(r)], 0) / 8 for r in ratios] for la in layers]
    return SchemeCosts(np.cumsum([0.0, *each]), np.array(shares).reshape(len(layers), len(ratios)))


def fit_contributions(
    profile: CostProfile,
    evaluate: Callable[[Sequence[Mode]], float],
    ratios: Sequence[float] = RATIOS,
) -> Contributions:
    """Measure contributions by one short fine-tuning per part: 1 + L + L x R of them.

    Parameters
    ----------
    profile : CostProfile
        Of the model.
    evaluate : callable
        ``evaluate(modes)`` returns the accuracy after fine-tuning the original model on a proxy task, with each
        group trained in its mode.
    ratios : sequence of float
        Shares of input channels.
    """
    count = len(trainable_layers(profile))

    def gain(scheme: Scheme) -> float:
        return float(evaluate(scheme_modes(profile, scheme)))

    bias = np.array([gain(Scheme(k)) for k in range(count + 1)])
    weights = [[gain(Scheme(count, ((i, r),))) - bias[-1] for r in ratios] for i in range(count)]
    return Contributions(bias - bias[0], np.array(weights).reshape(count, -1), tuple(ratios))


def search_scheme(
    contributions: Contributions,
    costs: SchemeCosts,
    budget: float,
    generator: np.random.Generator,
) -> Scheme:
    """Return a scheme of large total contribution whose total cost is within ``budget`` bytes.

    Contributions are added up, as in the paper (Lin et al., NeurIPS 2022). Weights are trained only where the
    biases are: where the error gradient comes at all. The paper searches by evolution and does not give its
    settings; here 128 schemes live for 80 generations, the best 32 stay and are crossed, and 8 % of the genes
    mutate.

    Raises
    ------
    BudgetError
        If the budget is not a number of at least 0.
    """
    if not budget >= 0:
        raise BudgetError(f"a scheme's memory budget is {budget} bytes, it must be at least 0")
    search = _Search(contributions, costs, budget, generator)
    population = search.fitting(search.random(_POPULATION))
    for _ in range(_GENERATIONS):
        best = population[np.argsort(-search.value(population), kind="stable")[:_PARENTS]]
        children = search.mutated(search.crossed(best, _POPULATION - _PARENTS))
        population = np.concatenate([best, search.fitting(children)])
    return search.scheme(population[int(np.argmax(search.value(population)))])


class _Search:
    """Genes of one scheme: how many biases, then for each layer 0 or one more than the column of its share."""

    def __init__(
        self,
        contributions: Contributions,
        costs: SchemeCosts,
        budget: float,
        generator: np.random.Generator,
    ) -> None:
        self.layers, self.shares = contributions.weights.shape
        self._ratios = contributions.ratios
        self._gain = np.pad(contributions.weights, ((0, 0), (1, 0)))
        self._cost = np.pad(costs.weights, ((0, 0), (1, 0)))
        self._bias_gain, self._bias_cost = contributions.bias, costs.bias
        self._budget, self._generator = budget, generator

    def value(self, genes: _Genes) -> _Floats:
        return self._total(genes, self._bias_gain, self._gain)

    def random(self, count: int) -> _Genes:
        biases = self._generator.integers(0, self.layers + 1, (count, 1))
        shares = self._generator.integers(1, self.shares + 1, (count, self.layers))
        trained = self._generator.random(shares.shape) < self._generator.random((count, 1))
        return np.concatenate([biases, np.where(trained, shares, 0)], axis=1)

    def crossed(self, parents: _Genes, count: int) -> _Genes:
        pairs = self._generator.integers(0, len(parents), (2, count))
        mine = self._generator.random((count, self.layers + 1)) < 0.5
        children: _Genes = np.where(mine, parents[pairs[0]], parents[pairs[1]])
        return children

    def mutated(self, genes: _Genes) -> _Genes:
        changed = self._generator.random(genes.shape) < _MUTATION
        fresh = self._generator.integers(0, self.shares + 1, genes.shape)
        steps = self._generator.integers(-_STEP, _STEP + 1, len(genes))
        fresh[:, 0] = np.clip(genes[:, 0] + steps, 0, self.layers)
        # The number of biases is one gene for many: it moves in every other child.
        changed[:, 0] = self._generator.random(len(genes)) < 0.5
        return np.where(changed, fresh, genes)

    def fitting(self, genes: _Genes) -> _Genes:
        """Take away weights out of reach, then weights at random and at last biases, until all is within budget."""
        genes = genes.copy()
        order = self._generator.permuted(np.tile(np.arange(self.layers), (len(genes), 1)), axis=1)
        reach = self.layers - genes[:, :1]
        genes[:, 1:][np.arange(self.layers) < reach] = 0
        for column in order.T:
            over = np.flatnonzero(self._total(genes, self._bias_cost, self._cost) > self._budget)
            if not len(over):
                return genes
            genes[over, 1 + column[over]] = 0
        most = int(np.flatnonzero(self._bias_cost <= self._budget)[-1])
        bare = ~genes[:, 1:].any(axis=1)
        genes[bare, 0] = np.minimum(genes[bare, 0], most)
        return genes

    def scheme(self, genes: _Genes) -> Scheme:
        chosen = enumerate(genes[1:].tolist())
        weights = tuple((layer, self._ratios[gene - 1]) for layer, gene in chosen if gene)
        return Scheme(int(genes[0]), weights)

    def _total(self, genes: _Genes, bias: _Floats, weights: _Floats) -> _Floats:
        own = weights[np.arange(self.layers), genes[:, 1:]].sum(axis=1)
        total: _Floats = bias[genes[:, 0]] + own
        return total
