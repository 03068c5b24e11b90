"""The samples of a stream as a client's data: the learner's saved model joined with the server's."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import StreamError
from fl_elastic.flower.client_round import RoundData
from fl_elastic.flower.stream_update import HeadLayout, best_of, relative_to_server
from fl_elastic.flower.tasks.evaluate import Evaluate
from fl_elastic.flower.tasks.solve_head import SolveHead
from fl_elastic.flower.tasks.task import RoundTask
from fl_elastic.flower.tasks.train import Train
from fl_elastic.groups import Batch, LossFn
from fl_elastic.losses import squared_outputs
from fl_elastic.streaming.labelled_weights import LabelledWeights, Shares, joined, kept, overlaid
from fl_elastic.streaming.round_inbox import RoundChange, RoundInbox, change_between
from fl_elastic.streaming.saved_learner import SavedLearner, StreamPosition
from fl_elastic.streaming.stream_options import Replay
from fl_elastic.training import ElasticTrainer, FitReport
from fl_elastic.update import Manifest, PartialUpdate, load_weights

if TYPE_CHECKING:
    from fl_elastic.closed_form.head_sums import HeadSums
    from fl_elastic.flower.client_round import Squares
    from fl_elastic.update.dampening import SquaredGradients


_LOG = logging.getLogger("fl_elastic")
JOININGS = {"measured": (0.5, 0.0, 0.25, 0.75, 1.0), "replace": (1.0,)}
"""Candidate shares of the global model by name: five to try, or all of it, as in federated averaging."""


@dataclass(frozen=True, eq=False)
class StreamSettings:
    """Settings that do not change from message to message.

    Parameters
    ----------
    folder : Path
        State folder of the learner.
    layout : HeadLayout
        Names of the head's tensors and the running statistics in the server's model.
    classes : tuple of int
        Labels of the server's outputs, in order.
    loss_fn : callable
        Loss of outputs and class indices.
    shares : tuple of float
        Shares of the server's model to try.
    replay, steps, seed
        See `fl_elastic.flower.StreamClient`.
    """

    folder: Path
    layout: HeadLayout
    classes: tuple[int, ...]
    loss_fn: LossFn
    shares: tuple[float, ...]
    replay: Replay
    steps: int
    seed: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise StreamError(f"steps is {self.steps}: give at least 1 step per round")


@dataclass(frozen=True, eq=False)
class Joined:
    """The server's model, and the joined one that a round begins with.

    Parameters
    ----------
    received : LabelledWeights
        The server's model.
    shares : Shares
        The server's share of the joined model.
    model : LabelledWeights
        The joined model.
    """

    received: LabelledWeights
    shares: Shares
    model: LabelledWeights


@dataclass(frozen=True, eq=False)
class StreamData(RoundData):
    """Model and data of a client of a stream: a learner's saved state, with the samples of its store.

    Attributes
    ----------
    settings : StreamSettings
        Settings that do not change.
    seen : SavedLearner
        The saved learner; its model is the one that is trained.
    position : StreamPosition
        Position in the stream at the last round.
    joined : Joined or None
        The joined model; None until the server's model has arrived.
    """

    settings: StreamSettings = field(kw_only=True)
    seen: SavedLearner = field(kw_only=True)
    position: StreamPosition = field(kw_only=True)
    joined: Joined | None = field(default=None, kw_only=True)

    one_pass: ClassVar[bool] = True

    @classmethod
    def of(cls, settings: StreamSettings, seen: SavedLearner, manifest: Manifest) -> StreamData:
        """Return the samples of a learner and the model that it saved.

        Raises
        ------
        StreamError
            If there is no labelled sample.
        """
        position = StreamPosition.load(settings.folder)
        loader = seen.loader(
            settings.replay, settings.steps, (settings.seed, position.rounds, 2), position
        )
        return cls(
            manifest, seen.trained, loader, _Window(seen), settings.loss_fn,
            settings=settings, seen=seen, position=position,
        )  # fmt: skip

    @property
    def keeps_features(self) -> bool:  # type: ignore[override]
        """Whether the learner keeps features, as with latent replay."""
        return self.seen.upper is not None

    def with_server(
        self, weights: Mapping[str, NDArray[Any]], fixed: frozenset[str], *, trains: bool
    ) -> StreamData:
        """Join the server's model with the learner's; return the data with the joined model.

        Parameters
        ----------
        weights : mapping of str to array
            The server's model.
        fixed : frozenset of str
            Tensors that are taken from the server unchanged.
        trains : bool
            Whether the joined model is trained or tested; other tasks use the server's model unchanged.
        """
        seen, settings = self.seen, self.settings
        received = LabelledWeights(weights, settings.classes, settings.layout.head)
        candidates = [Shares(share, fixed) for share in (settings.shares if trains else (1.0,))]
        for label in settings.classes:
            seen.classifier.learn(label)
        # Adding a class may replace the head module; joining the models sets the rows of new labels.
        own = replace(LabelledWeights.of(seen.classifier), labels=_known(seen))
        manifest = Manifest.of(seen.classifier.model, whole=True)

        def load(shares: Shares) -> None:
            load_weights(seen.classifier.model, manifest, joined(own, received, shares).weights)

        shares = best_of(candidates, load, seen.classifier, seen.untrained())
        begun = Joined(received, shares, LabelledWeights.of(seen.classifier))
        return replace(self, model=seen.trained, joined=begun)

    def examples(self, *, of_server: bool = False) -> Iterable[Batch]:
        """Return every labelled sample once; a target is the index of its label among the classes."""
        labels = self.settings.classes if of_server else self.seen.classifier.classes.labels
        return self.seen.every_sample(labels, self.settings.replay.rows)

    def weights(self) -> dict[str, NDArray[Any]]:
        """Return the weights in the server's form, with its classes."""
        if self.joined is None:
            return super().weights()
        whole = overlaid(self.joined.received, LabelledWeights.of(self.seen.classifier)).weights
        return {name: whole[name] for name in self.manifest.names}

    def update(self, trainer: ElasticTrainer, version: int) -> PartialUpdate:
        """Return the update relative to the server's model.

        Its weight is the number of samples in the store, or the number of draws if that is smaller.
        """
        assert self.joined is not None
        trained = LabelledWeights.of(self.seen.classifier)
        update = trainer.update(version)
        update = replace(update, num_examples=min(update.num_examples, self.seen.samples))
        return relative_to_server(self.joined.received, trained, update)

    def known_sums(self) -> HeadSums | None:
        """Return the sums behind the learner's head, if that head is in closed form."""
        weight = f"{self.seen.classifier.head_name}.weight"
        sums = self.seen.head_sums(weight, self.settings.classes)
        if sums is None:
            return None
        from fl_elastic.training.model_head import refuse_frozen_head

        refuse_frozen_head(self.model, weight, self.manifest.index)
        return sums.with_outputs(self.manifest.shape(weight)[0])

    def in_server_order(self, sums: HeadSums) -> HeadSums:
        """Return the sums with one column for each of the server's outputs."""
        return sums.of_outputs(self.manifest.shape(sums.weight)[0])

    def squares(self, compute: Callable[[LossFn], Squares]) -> Squares:
        """Return the squared gradients, arranged in the order of the server's outputs."""
        labels = self.seen.classifier.classes.labels
        places = [labels.index(label) for label in self.settings.classes]
        everything, forgotten = compute(
            lambda outputs, targets: squared_outputs(outputs[:, places], targets)
        )
        return (
            self._ordered(everything, labels),
            None if forgotten is None else self._ordered(forgotten, labels),
        )

    def finish(self, task: RoundTask, report: FitReport | None) -> dict[str, Any]:
        """Save the result of training for the learner to read; return metrics of the stream for the server."""
        if isinstance(task, Evaluate) or not task.brings_model:
            return {}
        if isinstance(task, SolveHead) and not task.reveals_data:
            # Noise or secure aggregation hides single samples in the sums; exact counts could reveal some.
            return {}
        if isinstance(task, Train):
            self._leave()
        progress, position = self.seen.progress, self.position
        assert self.joined is not None
        found = {
            "samples-since-round": progress.observed - position.observed,
            "labelled-since-round": progress.labelled - position.labelled,
            "drifts-since-round": progress.drifts - position.drifts,
            "store-bytes": self.seen.store.used_bytes,
            "joined-share": self.joined.shares.share,
        }
        if progress.labelled:
            found["prequential-accuracy"] = float(progress.accuracy)
        if report is not None:
            found["plan-share"] = float(report.plan.mask.mean())
        return found

    def _ordered(self, squares: SquaredGradients, labels: Sequence[int]) -> SquaredGradients:
        shapes = dict(zip(self.manifest.names, self.manifest.shapes, strict=True))
        head = self.settings.layout.head
        zeros = {name: np.zeros(shapes[name], np.float32) for name in squares.sums}
        mine = LabelledWeights(squares.sums, tuple(labels), head)
        theirs = LabelledWeights(
            zeros, self.settings.classes, tuple(name for name in head if name in zeros)
        )
        return replace(squares, sums=overlaid(theirs, mine).weights)

    def _leave(self) -> None:
        """Leave the result for the learner, and save the position in the stream."""
        begun, seen = self.joined, self.seen
        assert begun is not None
        trained = LabelledWeights.of(seen.classifier)
        now = kept(begun.model, trained, begun.received, begun.shares)
        new = tuple(label for label in now.labels if label not in seen.saved.labels)
        change = change_between(seen.saved, now)
        result = RoundChange(uuid.uuid4().hex, seen.rounds.last, change, new)
        try:
            RoundInbox(self.settings.folder).leave(result)
            seen.position(self.position).save(self.settings.folder)
        except OSError as error:
            # The server still gets its update.
            _LOG.warning(
                "the round's result could not be left in %s: %s", self.settings.folder, error
            )


def _known(seen: SavedLearner) -> tuple[int, ...]:
    """Return the labels for which the learner itself has rows."""
    stored = [label for label in seen.store.classes if label is not None]
    return tuple(
        label
        for label in seen.classifier.classes.labels
        if label in seen.saved.labels or label in stored
    )


@dataclass(frozen=True, eq=False)
class _Window:
    """A loader with one batch, the samples held out from training; it raises an error if there are none."""

    seen: SavedLearner

    def __iter__(self) -> Iterator[Batch]:
        yield self.seen.held_out_batch()


def shares_to_try(joining: str | Sequence[float]) -> tuple[float, ...]:
    """Return candidate shares of the global model, from 0 to 1; raise StreamError if they are invalid.

    `best_of` chooses the share with the highest accuracy on the device's newest samples; without samples, the
    first.

    >>> shares_to_try("replace"), shares_to_try([0.25])
    ((1.0,), (0.25,))
    """
    shares = JOININGS.get(joining) if isinstance(joining, str) else tuple(joining)
    if not shares or not all(0 <= share <= 1 for share in shares):
        raise StreamError(
            f"joining {joining!r} is invalid: give {' or '.join(JOININGS)}, or shares from 0 to 1"
        )
    return shares
