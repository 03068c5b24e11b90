"""A model that predicts labels, learns new ones, and provides the part that is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fl_elastic.errors import ElasticError, ModelError, StreamDataError, TrainingError, UpdateError
from fl_elastic.groups import LossFn
from fl_elastic.groups.forward import call_model, one_number, refusing_misfits
from fl_elastic.groups.untouched import untouched
from fl_elastic.profiling.profile import model_device
from fl_elastic.registry import first_line
from fl_elastic.streaming.body import Body, LastLayerBody, Look, Prepare, WholeModel, scores_of
from fl_elastic.streaming.growing_head import ClassMap, grow_head, head_name
from fl_elastic.streaming.guard import Row, Score
from fl_elastic.streaming.intake import Refused
from fl_elastic.streaming.latent import Latent, UpperPart
from fl_elastic.update import Manifest, load_weights, weights_of


@dataclass(frozen=True)
class SampleForm:
    """Dtype, by its numpy name, and shape of every sample."""

    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        self.zeros()

    def zeros(self) -> NDArray[Any]:
        """Return a sample of zeros."""
        return np.zeros(self.shape, np.dtype(self.dtype))


@dataclass(frozen=True, eq=False)
class ClassifierState:
    """State of a `Classifier`.

    Parameters
    ----------
    classes : tuple of int
        Labels of the first outputs.
    outputs : int or None
        Number of outputs; None if it is not known.
    like : SampleForm or None
        Form of each sample; None before the first one.
    features : str or None
        Version of the features of samples, as in `Classifier.version`.
    groups_above : int or None
        Number of tensor groups above the place where features are kept; None without such a place.
    weights : dict of str to array
        The model's tensors.
    """

    classes: tuple[int, ...]
    outputs: int | None
    like: SampleForm | None
    features: str | None
    groups_above: int | None
    weights: dict[str, NDArray[Any]]


class Classifier:
    """A model, the labels of its outputs, and the body that is trained.

    Parameters
    ----------
    model : nn.Module
        Put into eval mode.
    loss_fn : callable
        ``loss_fn(outputs, targets)`` of class scores and output indices.
    classes : sequence of int
        Labels of the model's first outputs.
    latent : Latent or None
        Where the frozen part ends; None if nothing is frozen.
    last_layer : bool
        Whether everything but the head is frozen and excluded from training.
    prepare : callable
        See `WholeModel`.
    seed : int
        Seed of new rows of the head.
    most : int
        Most classes; samples of further classes are refused.

    Attributes
    ----------
    loss_fn : callable
        As given.
    like : array or None
        An array with the shape and dtype of every sample; None before the first one.
    body : Body or None
        The trained part. Above a place, as with ``latent``, it is made from the first sample and None before.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        classes: Sequence[int],
        *,
        latent: Latent | None,
        prepare: Prepare,
        seed: int,
        last_layer: bool = False,
        most: int = 1000,
    ) -> None:
        self.model, self.classes = model.eval(), ClassMap()
        self.like: NDArray[Any] | None = None
        self._last_layer = last_layer
        self.loss_fn, self._latent, self._prepare = loss_fn, latent, prepare
        self._seed, self._most = seed, most
        self._width: int | None = None
        self.body: Body | None = None if latent else self._made()
        for label in ClassMap(tuple(classes)).labels:
            self.learn(label)

    @property
    def version(self) -> str | None:
        """Version of the features that are kept; None if inputs are kept."""
        return None if self.body is None else self.body.version

    @property
    def keeps_inputs(self) -> bool:
        """Whether samples are kept as they arrive, rather than their features."""
        return self._latent is None and not self._last_layer

    @property
    def width(self) -> int | None:
        """Number of class scores that the model returns; None before its first call."""
        return self._width

    @property
    def head_name(self) -> str:
        """Name of the layer that returns the class scores; ModelError if there is none."""
        return head_name(self.model)

    def look(self, sample: NDArray[Any]) -> Look:
        """Return what is stored of a sample, and its class scores; raises Refused if it does not fit."""
        kept, scores = self.looks(sample[None])
        return kept[0], scores[0]

    def looks(self, samples: NDArray[Any]) -> Look:
        """Return what is stored of each sample, and its class scores; raises Refused if one does not fit."""
        if self.model.training:
            self.model.eval()
        try:
            if self.body is None:
                self.body = self._made(samples[0])
            looked = self.body.looks(samples)
        except TrainingError as error:
            raise Refused(f"the model does not take it: {error}") from None
        except ElasticError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            reason = self._other_numbers(samples) or first_line(error)
            raise Refused(f"the model does not take it: {reason}") from None
        self.like = np.zeros_like(samples[0]) if self.like is None else self.like
        self._width = looked[1].shape[1]
        return looked

    def _other_numbers(self, samples: NDArray[Any]) -> str:
        """Return advice if the model accepts these samples in another number type; empty if it does not."""
        other = np.dtype(np.int64 if samples.dtype.kind == "f" else np.float32)
        try:
            WholeModel(self.model, self._prepare).looks(samples.astype(other))
        except (ElasticError, RuntimeError, ValueError, TypeError, IndexError):
            return ""
        return f"it takes {other}, and the sample is {samples.dtype}: convert samples, or give prepare="

    def predicted(self, scores: NDArray[np.float32]) -> int | None:
        """Return the known label with the highest score; None if no label is known."""
        known = scores[: len(self.classes)]
        return self.classes.label(int(known.argmax())) if len(known) else None

    def score(self, rows: Sequence[Row]) -> Score:
        """Return the body's loss and accuracy on labelled samples."""
        if not rows:
            return Score(0.0, 0.0, 0)
        assert self.body is not None
        with torch.no_grad():
            inputs = self.body.as_inputs(np.stack([row.x for row in rows]))
            outputs = scores_of(call_model(self.body.module, inputs))
            labels = np.array([row.y for row in rows], np.int64)
            targets = torch.from_numpy(self.classes.outputs(labels)).to(outputs.device)
            right = int((outputs[:, : len(self.classes)].argmax(1) == targets).sum())
            with refusing_misfits((inputs, targets)):
                loss = one_number(self.loss_fn(outputs, targets))
            return Score(float(loss), right / len(rows), len(rows))

    def refuse_unlearnable(self, label: int | None) -> None:
        """Raise Refused for a new label if the model has no output for it and cannot get one."""
        if label is None or label in self.classes:
            return
        if len(self.classes) >= self._most:
            raise Refused(f"a label beyond {self._most} classes")
        if self._width is not None and len(self.classes) >= self._width:
            try:
                name = self.head_name
                head = self.model.get_submodule(name)
            except (ModelError, AttributeError) as error:
                raise Refused(f"there is no output for another class: {error}") from None
            if not isinstance(head, nn.Linear) or head.out_features != self._width:
                raise Refused(
                    f"there is no output for another class: {name!r} does not give the scores"
                )
            reason = self._loss_refuses(self._width + 1)
            if reason and not self._loss_refuses(self._width):
                raise Refused(
                    f"there is no output for another class: the loss refuses it: {reason}"
                )

    def _loss_refuses(self, outputs: int) -> str:
        """Return why the loss cannot take this number of scores, such as too few class weights; empty if it can."""
        device = model_device(self.model)
        scores, targets = torch.zeros(1, outputs), torch.full((1,), outputs - 1)
        try:
            with untouched(nn.Identity(), self.loss_fn), torch.no_grad():
                self.loss_fn(scores.to(device), targets.to(device))
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            return first_line(error)
        return ""

    def learn(self, label: int) -> bool:
        """Add a label to the known classes, with a new output if none is free; return whether it was new."""
        if label in self.classes:
            return False
        self.classes = self.classes.with_label(label)
        if self._outputs() is not None and len(self.classes) > (self._outputs() or 0):
            self._grow(len(self.classes))
        return True

    def forget_newest(self, known: ClassMap) -> None:
        """Restore these labels, which are the first of the known ones; other outputs stay free for later labels."""
        self.classes = known

    def rebuild(self) -> None:
        """Build the body again from the present model."""
        self.close()
        self.model.eval()
        if self.body is None and (self._latent is None or self.like is not None):
            self.body = self._made(self.like)

    def close(self) -> None:
        """Restore the model to an ordinary one."""
        if self.body is not None:
            self.body.close()
        if self._latent is not None or self._last_layer:
            self.body = None

    def to_state(self) -> ClassifierState:
        """Return the state to save."""
        like, latent = self.like, self._latent
        return ClassifierState(
            self.classes.labels, self._outputs(), None if like is None else SampleForm(like.dtype.str, like.shape),
            self.version, None if latent is None else latent.groups, self.weights(),
        )  # fmt: skip

    def weights(self) -> dict[str, NDArray[Any]]:
        """Return the model's tensors."""
        return weights_of(self.model, Manifest.of(self.model, whole=True))

    def restore(self, state: ClassifierState) -> None:
        """Restore a saved state.

        Raises
        ------
        StreamError
            If the state belongs to another model.
        """
        try:
            if state.outputs is not None and state.outputs > (self._outputs() or np.inf):
                self._grow(state.outputs)
            load_weights(self.model, Manifest.of(self.model, whole=True), state.weights)
        except (UpdateError, ModelError) as error:
            raise StreamDataError(
                f"the saved state is of another model ({error}): give that one, or another state_dir"
            ) from None
        self.classes = ClassMap(state.classes)
        if state.like is not None:
            self.like = state.like.zeros()
        self.rebuild()

    def _outputs(self) -> int | None:
        """Return the number of class scores; None if neither the head nor a call of the model has shown it."""
        if self._width is not None:
            return self._width
        try:
            head = self.model.get_submodule(self.head_name)
        except (ModelError, AttributeError):
            return None
        return head.out_features if isinstance(head, nn.Linear) else None

    def _grow(self, outputs: int) -> None:
        grow_head(self.model, self.head_name, outputs, self._seed)
        self._width = None if self._width is None else outputs
        self.rebuild()

    def _made(self, example: NDArray[Any] | None = None) -> Body:
        if self._last_layer:
            return LastLayerBody(self.model, self.head_name, self._prepare)
        if self._latent is None:
            return WholeModel(self.model, self._prepare)
        assert example is not None
        return UpperPart(self.model, self._latent, self.loss_fn, example, self._prepare)
