"""Which tensors of a model are which, and which way of joining it with another one is the best on a device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from fl_elastic.groups import LossFn
from fl_elastic.streaming.adapting import score
from fl_elastic.streaming.body import Body
from fl_elastic.streaming.classifier import Classifier
from fl_elastic.streaming.guard import Row
from fl_elastic.streaming.head import ClassMap
from fl_elastic.streaming.joining import Layout
from fl_elastic.streaming.labelled import Shares
from fl_elastic.streaming.taking_up import head_tensors
from fl_elastic.update import Manifest, Role

__all__ = ["best_of", "layout_of"]

_LEAST_SAMPLES = 8


def layout_of(classifier: Classifier, manifest: Manifest) -> Layout:
    """Return which tensors are the head, running statistics, and parameters of layers that keep those."""
    statistics = tuple(n for n in manifest.names if manifest.role(n) is not Role.PARAMETER)
    layers = {name.rpartition(".")[0] for name in statistics}
    norms = tuple(
        name
        for name in manifest.names
        if name not in statistics and name.rpartition(".")[0] in layers
    )
    return Layout(head_tensors(classifier), statistics, norms)


def best_of(
    candidates: Sequence[Shares],
    load: Callable[[Shares], None],
    body: Body,
    loss_fn: LossFn,
    rows: Sequence[Row],
    classes: ClassMap,
) -> Shares:
    """Load the candidate that is right most often, and return it.

    Of equal ones that with the least loss: a loss alone prefers what is less sure of itself, as means are. The
    first one is taken where there are fewer than 8 samples to tell.

    Parameters
    ----------
    candidates : sequence of Shares
        At least one.
    load : callable
        Joins the models by these shares and loads the result into ``body``.
    body : Body
        The model.
    loss_fn : callable
        Of outputs and class indices.
    rows : sequence of Row
        Samples that are new to both models.
    classes : ClassMap
        Of the model's outputs.
    """
    chosen = candidates[0]
    if len(candidates) > 1 and len(rows) >= _LEAST_SAMPLES:
        ranks = []
        for shares in candidates:
            load(shares)
            found = score(body, loss_fn, rows, classes)
            loss = found.loss if math.isfinite(found.loss) else math.inf
            ranks.append((-found.accuracy, loss))
        chosen = candidates[ranks.index(min(ranks))]
    load(chosen)
    return chosen
