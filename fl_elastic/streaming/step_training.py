"""Training by steps: within the budget, on new and stored samples, undone if the model got worse."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.errors import TrainingError
from fl_elastic.groups import Batch
from fl_elastic.groups.forward import all_finite, compute_loss, to_device
from fl_elastic.groups.untouched import preserved_rng
from fl_elastic.optimizers import OptimizerFn
from fl_elastic.planning import Policy
from fl_elastic.profiling.profile import model_device
from fl_elastic.streaming.classifier import Classifier
from fl_elastic.streaming.dampening import dampen_body
from fl_elastic.streaming.guard import Guard, Row
from fl_elastic.streaming.intake import Refused
from fl_elastic.streaming.labelled_weights import LabelledWeights
from fl_elastic.streaming.learner_state import StateFolder
from fl_elastic.streaming.learning_rule import Adaptation, LearningRule, RuleState
from fl_elastic.streaming.progress import Progress
from fl_elastic.streaming.replay_loader import ReplayLoader
from fl_elastic.streaming.round_inbox import RoundChange, applied
from fl_elastic.streaming.stream_memory import StreamMemory
from fl_elastic.streaming.stream_options import Replay, StreamOptions, Trigger
from fl_elastic.training import ElasticTrainer, SelectionState
from fl_elastic.update import Manifest, load_weights, weights_of


class StepTraining(LearningRule):
    """Trains the body of a classifier by steps when its trigger says so, on new samples and on stored ones.

    Parameters
    ----------
    classifier : Classifier
        Its body is trained in place.
    guard : Guard
        Decides whether the model got worse.
    optimizer_fn : callable
        Makes a new optimiser for each adaptation, because momentum from older data would have a wrong direction.
    budget, policy
        See `ElasticTrainer`.
    trigger : Trigger
        When to adapt.
    replay : Replay
        How many rows of a batch come from the store.
    options : StreamOptions
        Its number of steps and options of training are used.
    seed : int
        Seed of every random choice.
    folder : StateFolder
        Keeps the measured costs.

    Attributes
    ----------
    selection : SelectionState
        Importance of the tensor groups and other results of earlier adaptations, from which the next one plans.
    """

    def __init__(
        self,
        classifier: Classifier,
        guard: Guard,
        *,
        optimizer_fn: OptimizerFn,
        budget: Budget,
        policy: str | Policy,
        trigger: Trigger,
        replay: Replay,
        options: StreamOptions,
        seed: int,
        folder: StateFolder,
    ) -> None:
        self._classifier, self._guard, self._seed = classifier, guard, seed
        self._optimizer_fn, self._budget, self._policy = optimizer_fn, budget, policy
        self._trigger, self._replay, self._options = trigger, replay, options
        self._folder, self._profile = folder, folder.profile()
        self.selection = SelectionState()

    def is_due(self, progress: Progress) -> bool:
        """Return whether the trigger says that it is time to adapt."""
        return self._trigger.due(progress.since, progress.since_drift)

    def adapt(self, memory: StreamMemory, progress: Progress) -> Adaptation | None:
        """Train the body; if this is undone, the weights are restored.

        Torch's random numbers, as in dropout, depend on the seed alone; its global random state is unchanged.

        Raises
        ------
        BudgetError
            If the budget does not even admit the head.
        """
        pool, body = memory.pool(self._classifier.classes), self._classifier.body
        if pool is None or body is None:
            return None
        seed = (self._seed, progress.adaptations)
        loader = ReplayLoader(pool, self._replay, self._options.steps, seed, body.as_inputs)
        module, manifest = body.module, Manifest.of(body.module, whole=True)
        weights = weights_of(module, manifest)
        before = self._classifier.score(memory.held_out)
        number = int(np.random.default_rng((*seed, 1)).integers(2**31))
        trainer = ElasticTrainer(
            module, self._classifier.loss_fn, self._optimizer_fn, budget=self._budget,
            policy=self._policy, profile=self._profile,
            options=replace(self._options.training, seed=number), state=deepcopy(self.selection),
        )  # fmt: skip
        facts: dict[str, Any] = {"trained": (), "groups": 0, "steps": 0, "loss": float("nan")}
        facts |= {"seconds": 0.0, "selection_seconds": 0.0}
        try:
            with _seeded(number):
                module.train()
                report = trainer.fit(loader)
        except TrainingError as error:
            undone = str(error)
        except BaseException:
            # Stopping the process, too, must not leave an incomplete adaptation.
            load_weights(module, manifest, weights)
            raise
        else:
            names = [group.name for group in report.plan.groups]
            facts |= {
                "trained": tuple(n for n, on in zip(names, report.plan.mask, strict=True) if on),
                "groups": len(names), "steps": report.steps, "loss": report.loss,
                "seconds": report.seconds, "selection_seconds": report.selection_seconds,
            }  # fmt: skip
            undone = ""
        finally:
            module.eval()
        undone = undone or self._broken(module, loader)
        after = before if undone else self._classifier.score(memory.held_out)
        undone = undone or self._guard.worse(before, after)
        if undone:
            load_weights(module, manifest, weights)
        else:
            self.selection = trainer.state
        if trainer.profile is not None and trainer.profile is not self._profile:
            self._folder.keep_profile(trainer.profile)
        self._profile = trainer.profile
        return Adaptation(
            at=progress.labelled, drift=progress.since_drift is not None,
            before=before, after=after, undone=undone, **facts,
        )  # fmt: skip

    def drifted(self) -> None:
        """Discard the selection, whose importances are from before the drift."""
        self.selection = SelectionState()

    def forget(
        self, rows: Sequence[Row], memory: StreamMemory, progress: Progress, *, alpha: float | None
    ) -> tuple[int, Sequence[Row]]:
        """Dampen the weights that are far more important to these samples than to all; see `dampen_body`."""
        del progress
        weights = 0
        if rows:
            weights = dampen_body(
                self._classifier, rows, memory.store, memory.held_out, alpha=alpha, seed=self._seed
            )
        # A policy may remember examples that it has used.
        self.selection = SelectionState()
        return weights, ()

    def apply_round_result(self, change: RoundChange, held_out: Sequence[Row]) -> str:
        """Apply a round's change unless the model gets worse."""
        return apply_round_result(change, self._classifier, self._guard, held_out)

    def to_state(self) -> RuleState:
        """Return the selection."""
        return RuleState(selection=self.selection)

    def restore(self, state: RuleState, *, same_features: bool) -> None:
        """Restore the selection."""
        del same_features
        self.selection = state.selection or SelectionState()

    def _broken(self, module: nn.Module, loader: Iterable[Batch]) -> str:
        """Return why the model is unusable regardless of its held-out score; empty if it is usable."""
        if not all(all_finite(parameter) for parameter in module.parameters()):
            return "a weight is no longer finite"
        with torch.no_grad():
            batch = to_device(next(iter(loader)), model_device(module))
            loss = float(compute_loss(module, self._classifier.loss_fn, batch))
        return "" if math.isfinite(loss) else f"the loss of a training batch became {loss}"


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with preserved_rng():
        torch.manual_seed(seed)
        yield


def apply_round_result(
    change: RoundChange, classifier: Classifier, guard: Guard, held_out: Sequence[Row]
) -> str:
    """Apply a round's change to the model; return why it was undone, empty if it was kept.

    Parameters
    ----------
    change : RoundChange
        The round's result.
    classifier : Classifier
        The learner's model; it learns new labels of the federation up to its limit of classes.
    guard : Guard
        Decides whether the model got worse.
    held_out : sequence of Row
        Samples on which the guard compares.
    """
    body = classifier.body
    if body is None:
        return "the learner has seen no sample as yet"
    version = body.version
    before, known = classifier.score(held_out), classifier.classes
    for label in change.new:
        try:
            classifier.refuse_unlearnable(label)
            classifier.learn(label)
        except Refused:
            continue
    present = LabelledWeights.of(classifier)
    manifest = Manifest.of(classifier.model, whole=True)
    undone = _misfit(present, change)
    if not undone:
        weights = applied(present, change, known.labels).weights
        if all(
            np.isfinite(weight).all() for weight in weights.values() if weight.dtype.kind == "f"
        ):
            load_weights(classifier.model, manifest, weights)
            classifier.rebuild()
            if classifier.version != version:
                undone = "the learner keeps features of a frozen part, which the round would change"
            elif classifier.body is not None:
                undone = guard.worse(before, classifier.score(held_out))
        else:
            undone = "a weight would not be finite"
    if undone:
        load_weights(classifier.model, manifest, present.weights)
        classifier.forget_newest(known)
        classifier.rebuild()
    return undone


def _misfit(present: LabelledWeights, change: RoundChange) -> str:
    """Return why the change cannot apply to this model; empty if it can."""
    theirs = change.change
    if set(theirs.weights) != set(present.weights) or theirs.head != present.head:
        return "it is of a model with other tensors"
    for name, here in present.weights.items():
        there = theirs.weights[name]
        rows = len(theirs.labels) if name in present.head else 0
        apart = there.shape[1:] != here.shape[1:] if rows else there.shape != here.shape
        if apart or there.dtype != here.dtype or (rows and len(there) < rows):
            return f"its tensor {name!r} has another shape or type"
    return ""
