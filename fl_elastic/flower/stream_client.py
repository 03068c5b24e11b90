"""A client of the federation whose data is a stream, and whose model a learner goes on with."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.errors import StreamError, TrainingError
from fl_elastic.flower.capabilities import Capabilities
from fl_elastic.flower.client import ElasticClient
from fl_elastic.flower.stream_update import (
    below_cut,
    best_of,
    layout_of,
    refuse_other_features,
    seen_from,
)
from fl_elastic.flower.tasks.evaluate import Evaluate
from fl_elastic.flower.tasks.rank_places import RankPlaces
from fl_elastic.flower.tasks.task import Answer, RoundTask
from fl_elastic.flower.tasks.train import Train
from fl_elastic.groups import Batch, LossFn
from fl_elastic.losses import classification_loss, squared_outputs
from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.optimizers import OptimizerFn
from fl_elastic.streaming.body import Prepare, as_floats
from fl_elastic.streaming.classifier import Classifier
from fl_elastic.streaming.joining import JOINING_RULES, JoiningRule
from fl_elastic.streaming.labelled import LabelledWeights, Shares, joined, kept, overlaid
from fl_elastic.streaming.replay import REPLAYS, Replay
from fl_elastic.streaming.round_inbox import RoundChange, RoundInbox, change_between
from fl_elastic.streaming.taking_up import labelled_weights
from fl_elastic.streaming.visit import Mark, Visit, visit
from fl_elastic.training import ElasticTrainer, ForwardOptions, TrainerOptions
from fl_elastic.update import Manifest, PartialUpdate, load_weights

if TYPE_CHECKING:
    from fl_elastic.flower.tasks.solve_head import SolveHead
    from fl_elastic.training.report import ForwardReport
    from fl_elastic.update.head_sums import HeadSums
    from fl_elastic.update.squared_gradients import SquaredGradients

__all__ = ["StreamClient"]

_LOG = logging.getLogger("fl_elastic")
_LEFT = ("by_share", "joined", "trained")

_STAYS = (
    "the learner of a stream keeps the model that it was given: use read='last', or give both a Readout from these "
    "places"
)


class StreamClient(ElasticClient):
    """Takes part in rounds with the samples of a stream, beside the learner of that stream.

    In each round the global model is joined with the one that the learner has saved, trained on samples of the
    store within the budget, and what was trained is sent. The joined model is left for the learner, which takes it
    up at its next sample if that is no worse. Learner and rounds may be different processes: they meet in the state
    folder alone.

    Where the fleet has a cut, what lies below it is the federation's, as everywhere; the joining is of what lies
    above. Features there are kept for as long as the store has their samples. A learner with latent replay takes
    part if its frozen part ends at the fleet's cut or below, and is the federation's to the bit: its store's
    features are what rounds train on, and later ones are stored in the precision that the server asks for. Sums
    for a head in closed form are over every labelled sample once; a learner whose own head is in closed form has
    them already, and answers without a pass over its samples.

    Parameters
    ----------
    model : nn.Module
        As the server knows it.
    stream_dir : path-like
        State folder of the `StreamLearner`, with its store ``samples.db`` in it.
    budget : Budget
        What one round may spend.
    joining : str or JoiningRule
        How the global model is joined with the device's own.
    classes : sequence of int, optional
        Labels of the server's outputs, in order; 0, 1, 2 and so on, if left out.
    optimizer_fn, loss_fn : callable
        As `ElasticClient` takes them.
    replay : str or Replay
        Recipe of the batches.
    steps : int
        Training steps of a round, if the budget pays for them.
    left : {"by_share", "joined", "trained"}
        What is left for the learner: the joined model as it is, or after the round's training. By share: of that
        training as much of each tensor as was the device's own; training on few samples of one device makes the
        federation's part worse, since nobody averages it.
    prepare, seed, head
        As the learner has them.
    **settings
        Of `ElasticClient`; ``state_dir`` is the folder ``rounds`` in ``stream_dir`` unless given.

    Raises
    ------
    StreamError
        If a setting means nothing.

    Examples
    --------
    >>> client = StreamClient(nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 2)), "state", budget=Budget(speedup=2))
    >>> client.fit([], {"fl_elastic.packed": True})[2]["fl_elastic.error"]
    'expected one packed buffer, got 0 arrays'
    """

    def __init__(
        self,
        model: nn.Module,
        stream_dir: str | Path,
        *,
        budget: Budget,
        joining: str | JoiningRule = "measured",
        classes: Sequence[int] | None = None,
        optimizer_fn: OptimizerFn | None = None,
        loss_fn: LossFn = classification_loss,
        replay: str | Replay = "er",
        steps: int = 20,
        left: str = "by_share",
        prepare: Prepare = as_floats,
        seed: int = 0,
        head: str = "",
        **settings: Any,
    ) -> None:
        if steps < 1:
            raise StreamError(f"{steps} steps of a round mean nothing: give at least 1")
        if left not in _LEFT:
            raise StreamError(f"left {left!r} means nothing: give {', '.join(_LEFT)}")
        if optimizer_fn is not None:
            settings["optimizer_fn"] = optimizer_fn
        self._folder = Path(stream_dir)
        settings.setdefault("state_dir", self._folder / "rounds")
        self._replay = REPLAYS.make(replay)
        super().__init__(model, [], [], budget=budget, loss_fn=loss_fn, **settings)
        # What a learner keeps and joins is the whole model, whatever of it is frozen.
        self._state.go_by(Manifest.of(model, whole=True))
        self.joining = JOINING_RULES.make(joining)
        self._plain_loss, self._steps, self._seed = loss_fn, steps, seed
        self._prepare, self._head = prepare, head
        self._task: RoundTask = Train()
        # The one that is trained may have more classes.
        self._blank = model
        blank = Classifier(model, loss_fn, (), latent=None, prepare=prepare, seed=seed, head=head)
        self._layout = layout_of(blank, self.manifest)
        outputs = self.manifest.shape(self._layout.head[0])[0]
        self._classes = tuple(range(outputs)) if classes is None else tuple(classes)
        if len(set(self._classes)) != len(self._classes) or len(self._classes) > outputs:
            raise StreamError(
                f"{len(self._classes)} classes for {outputs} outputs: name each once, at most so many"
            )
        self._mark = Mark()
        self._visit: Visit | None = None
        self._received: LabelledWeights | None = None
        self._shares, self._left = Shares(0.0), left
        self._joined: LabelledWeights | None = None

    def forget(self, ids: Iterable[int]) -> None:
        """Raise StreamError: the learner forgets samples, and the sums that this client sends are then without."""
        raise StreamError(
            "the samples of a stream are the learner's: let it forget them, by StreamLearner.forget or "
            "fl-elastic stream forget"
        )

    def capabilities(self, task: RoundTask | None = None) -> Capabilities:
        """Return what this device can do in a round; its costs are measured if they are not known."""
        self.loss_fn = self._replay.loss(self._plain_loss)
        try:
            self._visited()
            return super().capabilities(task)
        finally:
            self._end_visit()

    def _do(
        self, task: RoundTask, parameters: list[NDArray[Any]], config: dict[str, Any]
    ) -> Answer:
        """Do a task on the stream's samples, or evaluate the joined model on the learner's held-out window."""
        evaluates = isinstance(task, Evaluate)
        self.loss_fn = self._plain_loss if evaluates else self._replay.loss(self._plain_loss)
        if isinstance(task, RankPlaces):
            raise TrainingError(_STAYS)
        # What the server says of the round says how its model is joined with the learner's.
        self._task = task
        try:
            answer = super()._do(task, parameters, config)
            if evaluates or not task.brings_model:
                return answer
            seen = self._seen()
            if isinstance(task, Train):
                self._leave(seen)
            return replace(answer, metrics=answer.metrics | self._stream_metrics(seen))
        finally:
            self._end_visit()

    def _forward(self, below_cut: bool) -> ForwardOptions | None:
        """Return how the frozen prefix runs: not at all where the store has features."""
        keeps = self._visit is not None and self._visit.upper is not None
        return None if keeps else super()._forward(below_cut)

    def _passes(self, profile: CostProfile, options: TrainerOptions, examples: int) -> int:
        """Return one: a further pass would be over the same draws."""
        return 1

    def batches_in_time(self, task: RoundTask) -> Iterator[Batch]:
        """Yield the batches of all samples; none is begun after the deadline, but one."""
        self._count_once(self._seen().classifier.classes.labels)
        return super().batches_in_time(task)

    def _count_once(self, labels: Sequence[int]) -> None:
        """Go through every sample of these labels once, where rounds would draw from them."""
        self.train_loader = self._seen().every_sample(labels, self._replay.batch_size)
        self.loss_fn = self._plain_loss

    def _read_from(self, places: str) -> None:
        """Refuse to read elsewhere than the learner beside it does, which keeps its model."""
        if places != self._places:
            raise TrainingError(_STAYS)

    def squared_gradients(
        self, task: RoundTask, loss_fn: LossFn = squared_outputs
    ) -> tuple[SquaredGradients, SquaredGradients | None]:
        """Return the squares by the server's outputs, in its order."""
        labels, head = self._seen().classifier.classes.labels, self._layout.head
        self._count_once(labels)
        places = [labels.index(label) for label in self._classes]
        shapes = dict(zip(self.manifest.names, self.manifest.shapes, strict=True))

        def ordered(squares: SquaredGradients) -> SquaredGradients:
            mine = LabelledWeights(squares.sums, tuple(labels), head)
            names = {name: np.zeros(shapes[name], np.float32) for name in squares.sums}
            kept = tuple(name for name in head if name in names)
            theirs = LabelledWeights(names, self._classes, kept)
            return replace(squares, sums=overlaid(theirs, mine).weights)

        everything, forgotten = super().squared_gradients(
            task, lambda outputs, targets: loss_fn(outputs[:, places], targets)
        )
        return ordered(everything), None if forgotten is None else ordered(forgotten)

    def _running_sums(self, seen: Visit) -> HeadSums | None:
        """Return the sums that the learner's head was made from, if that is in closed form; no pass is needed."""
        weight = f"{seen.classifier.head_name}.weight"
        sums = seen.head_sums(weight, self._classes)
        if sums is None:
            return None
        from fl_elastic.training.head_sums import refuse_frozen_head

        refuse_frozen_head(weight, self.manifest.index)
        return sums.with_outputs(self.manifest.shape(weight)[0])

    def head_sums(self, task: RoundTask) -> tuple[HeadSums, int, ForwardReport | None]:
        """Return the sums for the server's outputs; those of the learner's own head need no pass."""
        running = self._running_sums(self._seen())
        if running is not None:
            return running, running.num_examples, None
        self._count_once(self._classes)
        sums, examples, forward = super().head_sums(task)
        return sums.of_outputs(self.manifest.shape(sums.weight)[0]), examples, forward

    def sums_apart(self, task: SolveHead) -> tuple[HeadSums, HeadSums]:
        """Return the sums for the server's outputs."""
        self._count_once(self._classes)
        total, held = super().sums_apart(task)
        outputs = self.manifest.shape(total.weight)[0]
        return total.of_outputs(outputs), held.of_outputs(outputs)

    def _take_in(self, weights: dict[str, NDArray[Any]], task: RoundTask) -> None:
        """Join the global model with the learner's; samples of the store are what is trained on."""
        seen = self._visited()
        received = LabelledWeights(weights, self._classes, self._layout.head)
        if seen.upper is not None:
            refuse_other_features(seen.upper, self._task, weights, seen.saved.weights)
        drifted = seen.progress.drifts > self._mark.drifts or seen.progress.since_drift is not None
        fixed = self._federations()
        candidates = [
            Shares(1.0) if not self._trains else replace(each, named={**each.named, **fixed})
            for each in self.joining.candidates(self._layout, drifted=drifted)
        ]
        for label in self._classes:
            seen.classifier.learn(label)
        # Learning a class may make the head another module; the rows of new labels are set by the joining.
        own = labelled_weights(seen.classifier)
        own = LabelledWeights(own.weights, self._known(seen), own.head)
        manifest = Manifest.of(seen.classifier.model, whole=True)

        def load(shares: Shares) -> None:
            load_weights(seen.classifier.model, manifest, joined(own, received, shares).weights)

        self._shares = best_of(
            candidates, load, seen.body, self._plain_loss, seen.untrained(), seen.classifier.classes
        )
        self.model, self._received = seen.trained, received
        self._joined = labelled_weights(seen.classifier)
        self.test_loader = _Window(seen)

    def _federations(self) -> dict[str, float]:
        """Return the tensors that are the federation's in every device, each with a share of 1."""
        task, names = self._task, set[str]()
        if task.cut and self._trains:
            graph = self._costs(self._batches()[0], self._options(task)).graph
            names = below_cut(graph, task.cut, self.manifest.names, self._layout)
        if task.kept_head:
            names |= {*self._layout.head}
        return dict.fromkeys(sorted(names), 1.0)

    @property
    def _trains(self) -> bool:
        """Whether the joined model is trained or tested: other tasks are about the server's model as it is."""
        return isinstance(self._task, (Train, Evaluate))

    def _known(self, seen: Visit) -> tuple[int, ...]:
        """Return the labels that the learner itself has rows for."""
        stored = [label for label in seen.store.classes if label is not None]
        known = [
            label
            for label in seen.classifier.classes.labels
            if label in seen.saved.labels or label in stored
        ]
        return tuple(known)

    def _weights(self) -> dict[str, NDArray[Any]]:
        """Return the model as the server knows it: its classes, and its own values of what is personal."""
        if self._visit is None or self._received is None:
            return super()._weights()
        personal = tuple(self.joining.personal(self._layout))
        whole = overlaid(self._received, labelled_weights(self._visit.classifier)).weights
        return {
            name: self._received.weights[name] if name.startswith(personal) else whole[name]
            for name in self.manifest.names
        }

    def _update(self, trainer: ElasticTrainer, version: int) -> PartialUpdate:
        """Return what was trained and is not personal, against the global model."""
        seen, received = self._seen(), self._received
        assert received is not None
        personal = self.joining.personal(self._layout)
        trained = labelled_weights(seen.classifier)
        return seen_from(received, trained, trainer.update(version), personal)

    def _visited(self) -> Visit:
        """Look at the learner as it was saved last; its samples are what is trained on."""
        self._end_visit()
        seen = visit(
            self._folder, self._blank, self._plain_loss,
            prepare=self._prepare, seed=self._seed, head=self._head,
        )  # fmt: skip
        self._visit, self._mark, self.model = seen, Mark.load(self._folder), seen.trained
        seed = (self._seed, self._mark.rounds, 2)
        try:
            self.train_loader = seen.loader(self._replay, self._steps, seed, self._mark)
        except StreamError:
            self._end_visit()
            raise
        return seen

    def _seen(self) -> Visit:
        assert self._visit is not None
        return self._visit

    def _end_visit(self) -> None:
        if self._visit is not None:
            self._visit.store.close()
        self._visit, self.model = None, self._blank

    def _stream_metrics(self, seen: Visit) -> dict[str, Any]:
        """Return what the server may want to know of the stream."""
        progress, mark, report = seen.progress, self._mark, self.report
        found = {
            "samples-since-round": progress.observed - mark.observed,
            "labelled-since-round": progress.labelled - mark.labelled,
            "drifts-since-round": progress.drifts - mark.drifts,
            "store-bytes": seen.store.used_bytes,
            "joined-share": self._shares.rest,
        }
        if progress.labelled:
            found["prequential-accuracy"] = float(progress.accuracy)
        if report is not None:
            found["plan-share"] = float(report.plan.mask.mean())
        return found

    def _to_leave(self, trained: LabelledWeights) -> LabelledWeights:
        """Return the model that the learner gets."""
        before, received = self._joined, self._received
        if before is None or received is None or self._left == "trained":
            return trained
        return before if self._left == "joined" else kept(before, trained, received, self._shares)

    def _leave(self, seen: Visit) -> None:
        """Leave the result for the learner, and note how far the stream was."""
        now = self._to_leave(labelled_weights(seen.classifier))
        new = tuple(label for label in now.labels if label not in seen.saved.labels)
        change = change_between(seen.saved, now)
        try:
            RoundInbox(self._folder).leave(
                RoundChange(uuid.uuid4().hex, seen.rounds.last, change, new)
            )
            seen.mark(self._mark).save(self._folder)
        except OSError as error:
            # The server gets its update all the same.
            _LOG.warning("the round's result could not be left in %s: %s", self._folder, error)


@dataclass(frozen=True, eq=False)
class _Window:
    """A loader of the held-out window, which says why where there is none."""

    seen: Visit

    def __iter__(self) -> Iterator[Batch]:
        yield self.seen.held_out_batch()
