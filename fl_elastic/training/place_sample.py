"""One short pass over data for ranking the places that a head may read: features at each place, and targets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fl_elastic.closed_form.folds import FOLDS
from fl_elastic.errors import PlanError, TrainingError
from fl_elastic.groups import Batch
from fl_elastic.groups.batch import IGNORED, as_pair, counted
from fl_elastic.groups.batch_rows import take_examples
from fl_elastic.groups.forward import LossFn, all_finite, refusing_misfits, to_device
from fl_elastic.groups.loss_settings import ignored_class
from fl_elastic.ops.inference import as_inference, traced
from fl_elastic.profiling.clock import Clock, clock_for
from fl_elastic.profiling.profile import model_device
from fl_elastic.readout.best_places import Sample
from fl_elastic.readout.candidates import candidate_places
from fl_elastic.readout.first_pass import FirstPass
from fl_elastic.readout.mirrored import mean_of_views, with_mirror_images
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
    device = model_device(model)
    ignored = IGNORED if loss_fn is None else ignored_class(loss_fn)
    gathered, reader, classes, left = _Gathered(examples), None, True, examples
    with evaluating(model), ExitStack() as stack:
        for given, size in within(counted(loader), seconds):
            batch = to_device(as_pair(given), device)
            if size > left:
                batch = tuple(take_examples(part, slice(left)) for part in batch)
            with refusing_misfits(batch):
                inputs, targets = as_pair(batch)
                if reader is None:
                    first = FirstPass.of(model, (inputs, targets))
                    reader = stack.enter_context(
                        _reader(model, first, asked, most_features, clock_for(device, clock))
                    )
                rows = reader.rows(inputs, min(size, left))
                narrow = next(iter(rows.values()))
                scores = torch.empty(len(narrow), reader.first.outputs)
                wanted, classes = as_numbers(None, targets, scores, ignored)
                if (
                    loss_fn is not None
                    and not gathered.count
                    and not wanted.isnan().any(dim=1).all()
                ):
                    loss = loss_of_scores(loss_fn, targets, reader.outputs)
                    refuse_other_scores(loss, wanted.nan_to_num(), classes)
                gathered.add(rows, wanted, example_keys(inputs, len(narrow), narrow))
            left -= len(narrow)
            if left <= 0:
                break
    if reader is None:
        raise TrainingError(NO_BATCH)
    sample = gathered.sample()
    passes = {place: reader.seconds(place) / gathered.count for place in sample.rows}
    return PlaceSample(sample, passes, classes, reader.first)


@contextmanager
def _reader(
    model: nn.Module, first: FirstPass, asked: Reading, most_features: int, now: Clock
) -> Iterator[_Reader]:
    """Find the places to read, and run the model as inference inside the block."""
    graph, places = None, asked.places
    if not places:
        graph = traced(model, first.few)
        places = candidate_places(model, first.few, most_features, first=first, graph=graph)
    if not places:
        raise TrainingError(
            f"no place of the model has at most {most_features} features, the largest affordable number: allow "
            "more memory or uplink bytes"
        )
    with as_inference(model, first.few, {place.module for place in places}, graph) as lay_out:
        yield _Reader(model, first, asked, places, lay_out, now)


class _Reader:
    """Reads the features of batches at several places, in one forward pass per batch.

    Attributes
    ----------
    first : FirstPass
        What a pass over the first examples showed.
    """

    def __init__(
        self,
        model: nn.Module,
        first: FirstPass,
        asked: Reading,
        places: tuple[Place, ...],
        lay_out: Callable[[Any], Any],
        now: Clock,
    ) -> None:
        self.first = first
        self._model, self._asked, self._places = model, asked, places
        self._lay_out, self._now = lay_out, now
        self._poolings: dict[Place, nn.Module] = {}
        self._widths: dict[Place, int] = {}
        # By module, and whether its input is read: the time of the passes up to there.
        self._spent: defaultdict[tuple[str, bool], float] = defaultdict(float)
        self._read = torch.empty(0)

    def rows(self, inputs: Any, examples: int) -> dict[Place, Tensor]:
        """Return a batch's features at each place, one row per example.

        A candidate place whose number of features differs from that of earlier batches is given up.
        """
        started = self._now()

        def note(place: Place) -> None:
            self._spent[place.module, place.at_input] += self._now() - started

        firsts = {(each.module, each.at_input): each for each in reversed(self._places)}
        seen = with_mirror_images(inputs) if self._asked.mirrored else inputs
        found = reaching(self._model, tuple(firsts.values()), self._lay_out(seen), reached=note)
        at = dict(zip(firsts, found, strict=True))
        rows = {
            place: own
            for place in self._places
            if (own := self._pooled(place, at[place.module, place.at_input], examples)) is not None
        }
        if not rows:
            raise TrainingError(
                "no place of the model has the same number of features in all batches, as inputs differ in size: "
                "read the last layer"
            )
        self._places, self._read = tuple(rows), found[0]
        return rows

    def _pooled(self, place: Place, tensor: Tensor, examples: int) -> Tensor | None:
        """Return the features at a place; None for a candidate whose number of features is not the earlier one."""
        if place not in self._poolings:
            self._poolings[place] = pooling_for(place, tensor)
        try:
            own: Tensor | None = self._poolings[place](tensor).float().cpu()
        except RuntimeError:
            if place not in self._widths:
                raise
            own = None
        if own is None or own.shape[1] != self._widths.setdefault(place, own.shape[1]):
            if not self._asked.places:
                return None
            raise PlanError(
                f"place {place} has different numbers of features in different batches, as inputs differ in size: "
                "pool it on a grid"
            )
        if len(own) != (1 + self._asked.mirrored) * examples:
            raise PlanError(
                f"place {place} has {len(own)} rows for {(1 + self._asked.mirrored) * examples} examples: time "
                "steps, tokens or nodes come first there, or a batch lacks targets"
            )
        return mean_of_views(own) if self._asked.mirrored else own

    def outputs(self, scores: Tensor) -> Tensor:
        """Return the model's outputs for scores, of the type and on the device of what was read."""
        return self.first.end.made_of(scores.type_as(self._read))

    def seconds(self, place: Place) -> float:
        """Return the time of all passes up to a place."""
        return self._spent[place.module, place.at_input]


class _Gathered:
    """Features at several places, targets and folds of the examples with a target, at most ``most`` of them.

    Attributes
    ----------
    count : int
        Number of examples so far.
    """

    def __init__(self, most: int) -> None:
        self.count = 0
        self._most = most
        self._features: dict[Place, Tensor] = {}
        self._targets: list[Tensor] = []
        self._keys: list[Tensor] = []

    def add(self, rows: dict[Place, Tensor], targets: Tensor, keys: list[int]) -> None:
        """Add a batch: rows of features by place, rows of targets that are NaN where unknown, keys for folds."""
        known = ~targets.isnan().any(dim=1)
        begin, self.count = self.count, self.count + int(known.sum())
        for place in self._features.keys() - rows.keys():
            del self._features[place]
        for place, own in rows.items():
            if place not in self._features:
                # Allocated for all examples at once, of which only written rows take memory: joining many small
                # tensors at the end would hold everything twice.
                self._features[place] = torch.empty(self._most, own.shape[1])
            self._features[place][begin : self.count] = own[known]
        self._targets.append(targets[known])
        self._keys.append(torch.tensor(keys, dtype=torch.int64)[known])

    def sample(self) -> Sample:
        """Return the sample, without places at which features are not finite."""
        if not self.count:
            raise TrainingError(NONE_COUNTS)
        filled = {place: rows[: self.count] for place, rows in self._features.items()}
        finite = {place: rows.numpy() for place, rows in filled.items() if all_finite(rows)}
        if not finite:
            raise TrainingError("features are not finite at any place: check the data for NaN")
        folds = (torch.cat(self._keys) % FOLDS).numpy()
        return Sample.of(finite, torch.cat(self._targets).numpy(), folds)
