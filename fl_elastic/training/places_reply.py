"""A client's reply to the server's request for samples of the places that a head can read."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.errors import TrainingError
from fl_elastic.groups import Batch
from fl_elastic.groups.forward import LossFn
from fl_elastic.profiling.profile import model_device
from fl_elastic.readout.best_reading import candidate_features
from fl_elastic.readout.first_pass import FirstPass
from fl_elastic.readout.place import MOST_FEATURES, Place, Reading
from fl_elastic.readout.places_wire import PlacesReply, sample_bytes
from fl_elastic.readout.readout_module import kept_tensors
from fl_elastic.training.evaluate import MetricsFn, of_a_batch
from fl_elastic.training.loader import first_batches
from fl_elastic.training.loss_of_scores import why_no_readout
from fl_elastic.training.place_sample import place_sample
from fl_elastic.training.sums_size import features_in_memory, sums_bytes


def places_reply(
    model: nn.Module,
    loader: Iterable[Batch],
    asked: Reading,
    *,
    examples: int,
    of_all: int,
    budget: Budget,
    names: Mapping[str, int],
    clock: str = "auto",
    loss_fn: LossFn | None = None,
    metrics_fn: MetricsFn | None = None,
) -> PlacesReply:
    """Return features of some examples at the places that the device can afford to read.

    Parameters
    ----------
    model : nn.Module
        The model as the server sent it.
    loader : iterable of batches
        The client's data, of which the first examples are used.
    asked : Reading
        The places, or none for all candidates.
    examples : int
        Number of examples asked for.
    of_all : int
        Number of examples that the client has: a pass over all of them must fit the deadline.
    budget : Budget
        Budget of the pass for sums: deadline, memory and uplink bytes.
    names : mapping of str to int
        Index of each tensor of the manifest.
    clock : str
        See `fl_elastic.profiling.clock`.
    loss_fn : callable, optional
        See `fl_elastic.training.place_sample.place_sample`.
    metrics_fn : callable, optional
        See `fl_elastic.training.evaluate.evaluate`.

    Raises
    ------
    TrainingError
        If the device can afford no place, or loss or metrics need more of the model's outputs than scores.
    """
    most = MOST_FEATURES
    if not asked.places:
        most = asked.width or MOST_FEATURES
        if budget.uplink is not None:
            (first,) = first_batches(loader, 1, model_device(model))
            outputs = FirstPass.of(model, first).outputs
            sent = partial(sums_bytes, outputs=outputs, examples=of_all)
            most = bisect_right(range(1, most + 1), budget.uplink, key=sent)
        if budget.memory is not None:
            most = min(most, features_in_memory(budget.memory, of_all))
    deadline = math.inf if budget.deadline is None else budget.deadline
    found = place_sample(
        model, loader, asked, examples=examples, clock=clock,
        most_features=candidate_features(most), seconds=deadline, loss_fn=loss_fn,
    )  # fmt: skip
    taken = [each for each in (loss_fn, of_a_batch(metrics_fn)) if each is not None]
    if why := why_no_readout(model, taken, found.first.few):
        raise TrainingError(f"{why}: read the last layer")
    rows = dict(found.sample.rows)
    if not asked.places:
        rows = _that_fit(rows, found.sample.targets.shape[1], budget.uplink)
        if all(row.shape[1] > most for row in rows.values()):
            raise TrainingError(
                f"no place of the model has at most {max(most, 1)} features, the largest affordable number: "
                "allow more memory or uplink bytes"
            )
        rows = {
            place: features
            for place, features in rows.items()
            if found.seconds[place] * of_all <= deadline
        }
    if not rows:
        raise TrainingError(
            f"a pass over {of_all} examples takes longer than {deadline:.3g} s at every place of the model"
        )
    return PlacesReply(
        replace(found.sample, rows=rows),
        found.seconds,
        _kept(model, tuple(rows), found.first.few[0], names),
        found.classes,
        found.first.end.layer,
        max(most, 1),
    )


def _that_fit(
    rows: Mapping[Place, NDArray[np.floating]], outputs: int, uplink: float | None
) -> dict[Place, NDArray[np.floating]]:
    """Return the places whose features fit the uplink budget, narrow ones first."""
    kept, features = set(), 0
    for place in sorted(rows, key=lambda place: rows[place].shape[1]):
        features += rows[place].shape[1]
        if uplink is None or sample_bytes(len(rows[place]), features, outputs) <= uplink:
            kept.add(place)
    return {place: each for place, each in rows.items() if place in kept}


def _kept(
    model: nn.Module, places: tuple[Place, ...], inputs: object, names: Mapping[str, int]
) -> dict[Place, tuple[int, ...]]:
    """Return the manifest's tensors, by index, in the part of the model that ends at each place."""
    return {
        place: tuple(sorted(names[name] for name in tensors if name in names))
        for place, tensors in kept_tensors(model, places, inputs).items()
    }
