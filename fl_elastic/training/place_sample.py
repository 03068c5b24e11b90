"""One short pass over data for ranking the places that a head may read: features at each place, and targets."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_elastic.closed_form.folds import FOLDS
from fl_elastic.errors import PlanError, TrainingError
from fl_elastic.groups import Batch
from fl_elastic.groups.batch import IGNORED, as_pair, counted
from fl_elastic.groups.batch_rows import take_examples
from fl_elastic.groups.forward import LossFn, all_finite, refusing_misfits, to_device
from fl_elastic.groups.graph import BackwardGraph
from fl_elastic.groups.loss_settings import ignored_class
from fl_elastic.ops.inference import as_inference, traced
from fl_elastic.profiling.clock import clock_for
from fl_elastic.profiling.profile import model_device
from fl_elastic.readout.best_places import Sample
from fl_elastic.readout.candidates import candidate_places
from fl_elastic.readout.first_pass import FirstPass
from fl_elastic.readout.mirrored import mean_of_views, with_mirror_images
from fl_elastic.readout.model_end import ModelEnd
from fl_elastic.readout.place import AUTO, Place, Reading
from fl_elastic.readout.poolings import pooling_for
from fl_elastic.readout.readout_module import reaching
from fl_elastic.training.evaluate import evaluating
from fl_elastic.training.gathered_sums import NONE_COUNTS
from fl_elastic.training.head_pass import example_keys
from fl_elastic.training.last_layer import as_numbers
from fl_elastic.training.loader import NO_BATCH, within
from fl_elastic.training.loss_of_scores import loss_of_scores, refuse_other_scores


@dataclass(frozen=True, eq=False)
class PlaceSample:
    """Features and targets of some examples at several places of a model.

    Attributes
    ----------
    sample : Sample
        Features at each place, and targets; equal examples are in the same of five folds.
    seconds : dict of Place to float
        Time per example of a forward pass that ends at the place.
    classes : bool
        Whether targets are classes.
    first : FirstPass
        Result of a pass over the first examples.
    """

    sample: Sample
    seconds: dict[Place, float]
    classes: bool
    first: FirstPass


def place_sample(
    model: nn.Module,
    loader: Iterable[Batch],
    asked: Reading = AUTO,
    *,
    examples: int,
    most_features: int,
    seconds: float = float("inf"),
    clock: str = "auto",
    loss_fn: LossFn | None = None,
) -> PlaceSample:
    """Return features of the first examples of a loader at many places of a model at once.

    The model runs in eval mode without gradients, and is left as it is.

    Parameters
    ----------
    model : nn.Module
        A model whose outputs are class scores, or numbers, of shape (N, C).
    loader : iterable of batches
        Targets are classes, shape (N,), or numbers, shape (N, C).
    asked : Reading
        The places, or none for `candidate_places`, and whether mirror images are read as well.
    examples : int
        Largest number of examples to use.
    most_features : int
        Largest number of features of a candidate place.
    seconds : float
        No batch is begun after this many seconds.
    loss_fn : callable, optional
        The loss that the head is for: targets of its ``ignore_index``, -100 by default, are left out.

    Raises
    ------
    TrainingError
        If targets do not fit the outputs, no target counts, or at no place all features are finite.
    PlanError
        If the model does not have one of the places.
    """
    now = clock_for(model_device(model), clock)
    features: dict[Place, Tensor] = {}
    gathered: list[tuple[Tensor, Tensor]] = []
    spent: dict[tuple[str, bool], float] = {}
    left, outputs, classes, count = examples, 0, True, 0
    poolings: dict[Place, nn.Module] = {}
    places, views = asked.places, 1 + asked.mirrored
    lay_out: Callable[[Any], Any] | None = None
    first: FirstPass | None = None
    graph: BackwardGraph | None = None
    ignored = IGNORED if loss_fn is None else ignored_class(loss_fn)
    with evaluating(model), ExitStack() as stack:
        for given, size in within(counted(loader), seconds):
            batch = to_device(as_pair(given), model_device(model))
            if size > left:
                batch = tuple(take_examples(part, slice(left)) for part in batch)
            with refusing_misfits(batch):
                inputs, targets = as_pair(batch)
                if first is None:
                    first = FirstPass.of(model, (inputs, targets))
                if not places:
                    graph = traced(model, first.few)
                    places = candidate_places(
                        model, first.few, most_features, first=first, graph=graph
                    )
                    if not places:
                        raise TrainingError(
                            f"no place of the model has at most {most_features} features, the largest affordable "
                            "number: allow more memory or uplink bytes"
                        )
                if lay_out is None:
                    outputs = first.outputs
                    read = {each.module for each in places}
                    lay_out = stack.enter_context(as_inference(model, first.few, read, graph))
                started = now()

                def note(place: Place, started: float = started) -> None:
                    where = place.module, place.at_input
                    spent[where] = spent.get(where, 0.0) + now() - started

                firsts = {(each.module, each.at_input): each for each in reversed(places)}
                seen = with_mirror_images(inputs) if asked.mirrored else inputs
                found = reaching(model, tuple(firsts.values()), lay_out(seen), reached=note)
                at = dict(zip(firsts, found, strict=True))
                rows: dict[Place, Tensor] = {}
                for place in places:
                    tensor = at[place.module, place.at_input]
                    if place not in poolings:
                        poolings[place] = pooling_for(place, tensor)
                    own = _pooled(poolings[place], tensor, features.get(place))
                    if own is None and not asked.places:
                        features.pop(place)
                        continue
                    if own is None:
                        raise PlanError(
                            f"place {place} has different numbers of features in different batches, as inputs "
                            "differ in size: pool it on a grid"
                        )
                    if len(own) != views * min(size, left):
                        raise PlanError(
                            f"place {place} has {len(own)} rows for {views * min(size, left)} examples: time "
                            "steps, tokens or nodes come first there, or a batch lacks targets"
                        )
                    rows[place] = mean_of_views(own) if asked.mirrored else own
                places = tuple(rows)
                if not places:
                    raise TrainingError(
                        "no place of the model has the same number of features in all batches, as inputs "
                        "differ in size: read the last layer"
                    )
                narrow = next(iter(rows.values()))
                scores = torch.empty(len(narrow), outputs)
                wanted, classes = as_numbers(None, targets, scores, ignored)
                known = ~wanted.isnan().any(dim=1)
                if loss_fn is not None and not count and known.any():
                    given = partial(_outputs, first.end, found[0])
                    loss = loss_of_scores(loss_fn, targets, given)
                    refuse_other_scores(loss, wanted.nan_to_num(), classes)
                keys = torch.tensor(example_keys(inputs, len(narrow), narrow), dtype=torch.int64)
                begin, count = count, count + int(known.sum())
                for place, each in rows.items():
                    if place not in features:
                        # Allocated for all examples at once, of which only written rows take memory: joining
                        # many small tensors at the end would hold everything twice.
                        features[place] = torch.empty(examples, each.shape[1])
                    features[place][begin:count] = each[known]
                gathered.append((wanted[known], keys[known]))
            left -= len(narrow)
            if left <= 0:
                break
    if not gathered or first is None:
        raise TrainingError(NO_BATCH)
    if not count:
        raise TrainingError(NONE_COUNTS)
    filled = {place: rows[:count] for place, rows in features.items()}
    finite = {place: rows.numpy() for place, rows in filled.items() if all_finite(rows)}
    if not finite:
        raise TrainingError("features are not finite at any place: check the data for NaN")
    folds = (torch.cat([keys for _, keys in gathered]) % FOLDS).numpy()
    sample = Sample.of(
        finite,
        torch.cat([wanted for wanted, _ in gathered]).numpy(),
        np.asarray(folds, dtype=np.int64),
    )
    passes = {place: spent.get((place.module, place.at_input), 0.0) / count for place in finite}
    return PlaceSample(sample, passes, classes, first)


def _outputs(end: ModelEnd, kind: Tensor, scores: Tensor) -> Tensor:
    """Return the outputs of a model with this end for scores, of the type and on the device of a tensor."""
    return end.made_of(scores.type_as(kind))


def _pooled(pooling: nn.Module, tensor: Tensor, known: Tensor | None) -> Tensor | None:
    """Return a batch's features at a place; None if their number is not the known one, as of larger inputs."""
    try:
        own = pooling(tensor).float().cpu()
    except RuntimeError:
        if known is None:
            raise
        return None
    return own if known is None or own.shape[1] == known.shape[1] else None
