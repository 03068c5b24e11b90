"""Costs of a head in closed form, apart from inference: measured once, beside the cost profile."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.closed_form.folds import Fold
from fl_elastic.closed_form.head import best_ridge, penalties_tried
from fl_elastic.closed_form.head_sums import HeadSums
from fl_elastic.closed_form.head_sums_wire import decode_head_sums, encode_head_sums
from fl_elastic.closed_form.ridge import Ridge, RidgeSystem
from fl_elastic.closed_form.trusted_sums import harmful
from fl_elastic.errors import ElasticError
from fl_elastic.groups import Batch
from fl_elastic.groups.batch import batch_size
from fl_elastic.readout.best_places import Sample, choose_places
from fl_elastic.readout.place import AUTO, Place
from fl_elastic.training.places_reply import places_reply
from fl_elastic.training.sums_size import held_out
from fl_elastic.update.manifest import Manifest

_ROWS, _REPEATS, _FOLDS, _BATCHES = 256, 3, 5, 4
# Clients, classes and examples of a typical fleet, and numbers of places and features as in MobileNetV2.
_CLIENTS, _CLASSES, _RANKED, _PLACES, _WIDE = 8, 40, 640, 33, 1000
_SPREAD = 6.0


@dataclass(frozen=True)
class HeadCosts:
    """CPU seconds of one thread of the host per unit of work; a device's time is this times its slowdown.

    Attributes
    ----------
    product : float
        Adding the products of the features of an example that is not held out, per ``features**2``.
    row : float
        Computing the rows of a fold for sending, per ``examples**2 * features``.
    packing : float
        Writing the sums over the examples that are not held out, if there are any, per ``features**2``.
    checking : float
        Reading these sums on the server, and checking that examples can have them, per ``features**3``.
    solving : float
        Solving for a head from the sums of eight clients, on the server, per ``features**3``.
    trying : float
        Computing the error of a penalty on held-out examples, per ``features**3``.
    ranking : float
        Choosing among places, on the server, per feature of a place.
    asked : float
        Preparing a client's answer about where its model can be read, before any example.
    pooled : float
        Computing the features at all of the model's places, per example, with inference.

    Examples
    --------
    >>> costs = HeadCosts(product=1.0, row=0.1, packing=10.0)
    >>> costs.sums(10, 4), costs.sums(320, 4) / 1024, costs.sums(325, 4) - costs.sums(320, 4)
    (8.0, 8.0, 240.0)
    """

    product: float = 0.0
    row: float = 0.0
    packing: float = 0.0
    checking: float = 0.0
    solving: float = 0.0
    trying: float = 0.0
    ranking: float = 0.0
    asked: float = 0.0
    pooled: float = 0.0

    def sums(self, examples: int, features: int) -> float:
        """Return a client's seconds for the sums over these examples, apart from the passes through the model."""
        held = min(examples, held_out(features))
        seconds = self.row * held**2 / _FOLDS * features
        if examples > held:
            seconds += (self.product * (examples - held) + self.packing) * features**2
        return seconds

    def answering(self, examples: int) -> float:
        """Return the seconds of a client's answer about the places of its model, from these examples."""
        return self.asked + self.pooled * examples

    def on_server(
        self, features: int, penalty: float, ranked: int, examples: Iterable[int] = ()
    ) -> float:
        """Return the server's seconds to rank places and to solve for a head.

        Parameters
        ----------
        features : int
            Number of features of the head; 0 if there is none.
        penalty : float
            The penalty that was found.
        ranked : int
            Number of features of all ranked places together.
        examples : iterable of int
            Numbers of examples of the clients whose sums the head is from.
        """
        seconds = self.ranking * ranked
        if features:
            checked = sum(each > held_out(features) for each in examples)
            cubes = self.solving + penalties_tried(penalty) * self.trying + checked * self.checking
            seconds += cubes * features**3
        return seconds


def measure_head_costs(model: nn.Module, features: int, batch: Batch) -> HeadCosts:
    """Measure the costs of a head on this host, as CPU time of all threads.

    Parameters
    ----------
    model : nn.Module
        Model whose places are read if they are to be chosen.
    features : int
        Number of features of the head.
    batch : batch
        A batch like a client's.
    """
    examples = held_out(features) // _FOLDS
    solving, trying, ranking = _server_seconds(features)
    packing, checking = _rest_seconds(features)
    rows = np.random.default_rng(0).normal(size=(_ROWS, features + 1))
    rows[:, -1] = 1.0
    fold = Fold.of(rows[:examples, :-1], rows[:examples, :1])
    adding = _median_seconds(lambda: rows.T @ rows)
    writing = _median_seconds(fold.centred)
    one, more = (_median_seconds(partial(_answer, model, [batch] * k)) for k in (1, _BATCHES))
    size = batch_size(batch)
    pooled = max(more - one, 0.0) / (_BATCHES - 1) / size
    return HeadCosts(
        product=adding / (_ROWS * (features + 1) ** 2),
        row=writing / (fold.num_examples**2 * features),
        packing=packing / features**2,
        checking=checking / features**3,
        solving=solving / features**3,
        trying=trying / features**3,
        ranking=ranking,
        asked=max(one - pooled * size, 0.0),
        pooled=pooled,
    )


def _answer(model: nn.Module, batches: list[Batch]) -> None:
    examples = len(batches) * batch_size(batches[0])
    names = {name: number for number, name in enumerate(Manifest.of(model).names)}
    # A model without places raises an error, in about the time that finding places takes.
    with suppress(ElasticError):
        places_reply(
            model, batches, AUTO, examples=examples, of_all=examples, budget=Budget(), names=names
        )


def _rest_seconds(features: int) -> tuple[float, float]:
    """Return the seconds of writing, and of reading, the sums over a client's examples that are not held out."""
    layer = nn.Linear(features, _CLASSES)
    rng = np.random.default_rng(0)
    rows = np.hstack([rng.normal(size=(_ROWS, features)), np.ones((_ROWS, 1))])
    targets = np.eye(_CLASSES)[rng.integers(0, _CLASSES, _ROWS)]
    sums = HeadSums("weight", rows.T @ rows, rows.T @ targets, targets.sum(axis=0), True)
    manifest = Manifest.of(layer)
    packed = encode_head_sums(sums, manifest)
    return (
        _median_seconds(lambda: encode_head_sums(sums, manifest)),
        _median_seconds(lambda: decode_head_sums(packed, manifest)),
    )


def _server_seconds(features: int) -> tuple[float, float, float]:
    """Return the seconds of a head from eight clients, of trying a penalty, and of ranking places per feature."""
    rng = np.random.default_rng(0)
    classes = rng.integers(0, _CLASSES, size=(_CLIENTS, _FOLDS, max(features // 16, 8)))
    centres = rng.normal(size=(_CLASSES, features))
    rows = centres[classes] + _SPREAD * rng.normal(size=(*classes.shape, features))
    sums = [
        HeadSums.of_folds(
            "weight",
            [Fold.of(fold, np.eye(_CLASSES)[labels]) for fold, labels in zip(*own, strict=True)],
            features,
            _CLASSES,
            True,
        )
        for own in zip(rows, classes, strict=True)
    ]
    started = time.process_time()
    ridge, _ = best_ridge(system := RidgeSystem.of(sums, intercept=True))
    harmful(ridge)
    ridge.layer()
    whole = time.process_time() - started
    trying = _median_seconds(
        lambda: [each.squared_errors() for each in Ridge(system, ridge.penalty).without]
    )
    solving = max(whole - penalties_tried(ridge.penalty) * trying, 0.0)
    places = {
        Place(f"block{number}", "flat"): rng.normal(size=(_RANKED, _WIDE)).astype(np.float32)
        for number in range(_PLACES)
    }
    sample = Sample.of(
        places, np.eye(_CLASSES)[rng.integers(0, _CLASSES, _RANKED)], np.arange(_RANKED)
    )
    started = time.process_time()
    choose_places(sample, most_features=2 * _WIDE)
    return solving, trying, (time.process_time() - started) / (_PLACES * _WIDE)


def _median_seconds(work: Callable[[], object]) -> float:
    """Return the median time of several calls after a warm-up."""
    taken = []
    for _ in range(_REPEATS + 1):
        started = time.process_time()
        work()
        taken.append(time.process_time() - started)
    return statistics.median(taken[1:])
