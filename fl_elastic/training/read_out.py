"""A closed-form head on one device that chooses where to read the model: one short and one whole pass."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from fl_elastic.closed_form.head import ClosedFormHead
from fl_elastic.errors import TrainingError
from fl_elastic.groups import Batch
from fl_elastic.groups.batch import as_pair
from fl_elastic.groups.forward import LossFn
from fl_elastic.profiling.profile import model_device
from fl_elastic.readout.best_places import EXAMPLES, Choice
from fl_elastic.readout.best_reading import candidate_features, choose_reading
from fl_elastic.readout.first_pass import FirstPass
from fl_elastic.readout.place import MOST_FEATURES, Reading
from fl_elastic.readout.readout_module import Readout
from fl_elastic.training.loader import check_rereadable, first_batches
from fl_elastic.training.loss_of_scores import why_no_readout
from fl_elastic.training.model_head import solve_head
from fl_elastic.training.options import eager
from fl_elastic.training.place_sample import place_sample

_LOG = logging.getLogger("fl_elastic")


@dataclass(frozen=True, eq=False)
class ReadOut:
    """The result of `read_out`.

    Attributes
    ----------
    model : nn.Module
        A `fl_elastic.readout.Readout` with its head; or the given model, if the input of its last layer is
        the best place.
    head : ClosedFormHead
        Weights, penalty and error on held-out examples.
    choice : Choice or None
        The error at each place; None if ``read`` named the places.
    """

    model: nn.Module
    head: ClosedFormHead
    choice: Choice | None


def read_out(
    model: nn.Module,
    loader: Iterable[Batch],
    *,
    read: str = "auto",
    loss_fn: LossFn | None = None,
) -> ReadOut:
    """Return a model that ends where a head in closed form reads best, without a step of training.

    Parameters
    ----------
    model : nn.Module
        A model that outputs one row of numbers per example. Its tensors are shared with the result and not changed,
        except those of its last layer if that is the best place.
    loader : iterable of batches
        Re-iterable, in random order: the first 640 examples choose the places. Targets are classes, shape (N,), or
        numbers, shape (N, C).
    read : str
        ``auto``, ``last`` for the last linear layer, or names of places such as
        ``features.3@grid8+features.6@grid4``. ``auto>512`` bounds the features read per example, 2,048 otherwise:
        the time of the sums grows with their square. Below 1,920 the features of the places are projected onto
        this many directions. ``mirrored:auto``, or ``mirrored:`` before places, reads the mean over each image and
        its mirror image, which takes twice as long; for data whose classes do not depend on left and right.
    loss_fn : callable, optional
        The loss that the head is for, see `fl_elastic.training.head_pass.head_sums`.

    Raises
    ------
    TrainingError
        If targets do not fit the outputs, or data are missing or not finite.
    PlanError
        If the model has none of the places.
    UpdateError
        If places cannot be compared, because all examples or all targets are equal.

    Examples
    --------
    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    >>> images, labels = 0.1 * torch.randn(64, 1, 8, 8), torch.arange(64).remainder(2)
    >>> for image, label in zip(images, labels):
    ...     image[0, :, 4 * label : 4 * label + 4] += 1.0
    >>> found = read_out(model, list(zip(images.split(16), labels.split(16))))
    >>> (found.model(images).argmax(1) == labels).float().mean().item()
    1.0
    """
    check_rereadable(loader, "read_out reads it for the choice and for the head")
    model, choice = readout_of(model, loader, read, loss_fn=loss_fn)
    head, _ = solve_head(model, loader, loss_fn=loss_fn)
    return ReadOut(model, head, choice)


def readout_of(
    model: nn.Module,
    loader: Iterable[Batch],
    read: str = "auto",
    *,
    loss_fn: LossFn | None = None,
) -> tuple[nn.Module, Choice | None]:
    """Return a model that ends where its head reads, with a head of zeros, and the choice if one was made.

    If the head reads at the last layer, this is the model itself. Parameters are those of `read_out`.
    """
    model = eager(model)
    if read == "last":
        return model, None
    batch = as_pair(first_batches(loader, 1, model_device(model))[0])
    first = FirstPass.of(model, batch)
    asked = Reading.parse(read)
    why = first.why_last or why_no_readout(model, () if loss_fn is None else (loss_fn,), first.few)
    if why and not asked.places:
        _LOG.warning("%s: the head reads the input of the last layer", why)
        return model, None
    if why:
        raise TrainingError(f"{why}: read='last' reads the input of the last layer")
    inputs, outputs = batch[0], first.outputs
    if asked.places and not asked.width:
        return Readout(model, asked, inputs, outputs), None
    most = MOST_FEATURES if asked.places else asked.width or MOST_FEATURES
    found = place_sample(
        model, loader, asked, examples=EXAMPLES, most_features=candidate_features(most),
        loss_fn=loss_fn,
    )  # fmt: skip
    chosen = choose_reading(found.sample, asked, most_features=most)
    if chosen.choice is not None:
        best = chosen.choice.best
        _LOG.info(
            "the head reads %s: squared error %.2f of the mean's on held-out ones of %d examples, %d features",
            chosen.reading, best.error, round(found.sample.num_examples),
            chosen.reading.width or best.features,
        )  # fmt: skip
    if chosen.reading.is_at(first.end.layer):
        return model, chosen.choice
    readout = Readout(model, chosen.reading, inputs, outputs)
    if readout.projection is not None and chosen.directions is not None:
        readout.projection.load(chosen.directions)
    return readout, chosen.choice
