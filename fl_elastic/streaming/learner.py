"""A device that learns from its own stream."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.errors import StreamDataError, StreamError
from fl_elastic.given import of_another_kind, whole
from fl_elastic.groups import LossFn
from fl_elastic.losses import classification_loss
from fl_elastic.optimizers import OptimizerFn
from fl_elastic.planning import POLICIES, Policy
from fl_elastic.streaming.arrivals import Arrivals, Arrived, Observation, SenderIds, noted_arrivals
from fl_elastic.streaming.body import Prepare, as_floats
from fl_elastic.streaming.classifier import Classifier, ClassifierState
from fl_elastic.streaming.dampening import Forgotten
from fl_elastic.streaming.drift import DRIFT_DETECTORS, DriftDetector, DriftMemory
from fl_elastic.streaming.folder_lock import owning
from fl_elastic.streaming.guard import Guard
from fl_elastic.streaming.intake import Refused, checked_label
from fl_elastic.streaming.latent import Latent
from fl_elastic.streaming.learner_state import LearnerState, StateFolder
from fl_elastic.streaming.learning_rule import Adaptation, LearningRule
from fl_elastic.streaming.prequential import NO_SUCH_SAMPLE, Prequential
from fl_elastic.streaming.round_inbox import RoundInbox
from fl_elastic.streaming.solved_head import SolvedHead
from fl_elastic.streaming.sources import SourcePosition
from fl_elastic.streaming.step_training import StepTraining
from fl_elastic.streaming.store.sample_store import SampleStore
from fl_elastic.streaming.stream_memory import StreamMemory
from fl_elastic.streaming.stream_options import ClosedForm, Replay, StreamOptions, Trigger
from fl_elastic.streaming.write_ahead import WriteAhead, log_bytes
from fl_elastic.training.options import check_parts

_LOG = logging.getLogger("fl_elastic")


class StreamLearner:
    """Predicts each sample of a stream, keeps it, and adapts the model within the device's budget when this is due.

    After a restart it continues from the same point, with the same random numbers: everything that it has reported
    is in the saved state or in the log of later events, and reaches the store exactly once. Nothing else may add
    samples to its store.

    Parameters
    ----------
    model : nn.Module
        Returns one table of class scores; trained in place, and given more outputs for new classes.
    store : SampleStore
        Memory of the stream, for replay. The caller closes it.
    budget : Budget, optional
        Limit for one adaptation; by default there is none.
    policy : str or Policy
        A registered name, or a configured policy object; after a drift it computes importances anew.
    optimizer_fn : callable
        ``optimizer_fn(parameters)`` returns a torch optimiser; called for each adaptation. Not needed with a head
        in closed form.
    loss_fn : callable
        ``loss_fn(outputs, targets)`` of class scores and output indices.
    trigger : Trigger, optional
        When to adapt; by default every 50 labelled samples, and 32 after a drift.
    detector : str or callable
        Name of a registered drift detector, or a function that makes one.
    replay : Replay, optional
        How many rows of a batch come from the store; by default half of 32.
    guard : Guard, optional
        Which samples are held out, and when the model counts as worse.
    state_dir : path-like
        Folder of the saved state; made if missing. Until the learner is closed other processes cannot have it, and
        a later learner of this process takes it over.
    seed : int
        Seed of every random choice.
    classes : sequence of int
        Labels of the model's present outputs, in order; further labels follow as they appear. At a restart the
        saved ones are used, and others are refused.
    latent : Latent, optional
        If given, the model is frozen below a place, and features of samples are kept instead of inputs. The budget
        then applies to training the part above.
    head : ClosedForm, optional
        If given, nothing is trained by steps: after each label the last linear layer is solved in closed form for
        all labelled samples, from running sums, and everything below is frozen. Features are kept instead of
        inputs. Budget, policy, trigger and replay then have no effect; the guard does.
    prepare : callable
        Turns a batch of samples into the model's input; see `WholeModel`.
    options : StreamOptions, optional
        All other settings.

    Raises
    ------
    StreamError
        If a setting is invalid, the saved state belongs to another model, another process has the folder, or
        a later learner of this process has taken it over.

    Examples
    --------
    >>> import tempfile, numpy as np, torch
    >>> folder = tempfile.TemporaryDirectory()
    >>> store = SampleStore(folder.name + "/samples.db", 2**20)
    >>> learner = StreamLearner(
    ...     nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2)), store, budget=Budget(),
    ...     policy="full", optimizer_fn=lambda p: torch.optim.Adam(p, lr=0.05), detector="none",
    ...     trigger=Trigger(20), state_dir=folder.name)
    >>> draw = np.random.default_rng(0)
    >>> for x in draw.normal(size=(100, 2)).astype(np.float32):
    ...     seen = learner.observe(x, y=int(x[0] > 0))
    >>> learner.progress.adaptations, learner.progress.accuracy > 0.8
    (5, True)
    >>> learner.close()
    True
    >>> store.close(); folder.cleanup()
    """

    def __init__(
        self,
        model: nn.Module,
        store: SampleStore,
        *,
        budget: Budget | None = None,
        policy: str | Policy = "elastic",
        optimizer_fn: OptimizerFn | None = None,
        loss_fn: LossFn = classification_loss,
        trigger: Trigger | None = None,
        detector: str | Callable[[], DriftDetector] = "adwin",
        replay: Replay | None = None,
        guard: Guard | None = None,
        state_dir: str | os.PathLike[str],
        seed: int = 0,
        classes: Sequence[int] = (),
        latent: Latent | None = None,
        head: ClosedForm | None = None,
        prepare: Prepare = as_floats,
        options: StreamOptions | None = None,
    ) -> None:
        if head is not None:
            _check_closed_form(head, latent, store)
            optimizer_fn = optimizer_fn or _no_steps
        budget = Budget() if budget is None else budget
        check_parts(model, loss_fn, optimizer_fn, budget)
        assert optimizer_fn is not None
        POLICIES.check(policy)
        wrong = of_another_kind(
            store=(store, SampleStore), trigger=(trigger, Trigger), replay=(replay, Replay),
            guard=(guard, Guard), latent=(latent, Latent), options=(options, StreamOptions),
        )  # fmt: skip
        if wrong or whole(seed) is None:
            raise StreamError(wrong or f"seed {seed!r} is no whole number")
        self.store, self.options = store, options or StreamOptions()
        self._folder = StateFolder(state_dir)
        self._inbox, self._claimed = RoundInbox(state_dir), False
        self._log = WriteAhead(self._folder.path, log_bytes(store.capacity_bytes), self.save)
        self._classifier = Classifier(
            model, loss_fn, tuple(map(_class_number, classes)), latent=latent, prepare=prepare,
            seed=seed, most=self.options.most_classes, last_layer=head is not None,
        )  # fmt: skip
        guard = guard or Guard()
        self.rule: LearningRule = (
            StepTraining(
                self._classifier, guard, optimizer_fn=optimizer_fn, budget=budget, policy=policy,
                trigger=trigger or Trigger(), replay=replay or Replay(), options=self.options, seed=seed,
                folder=self._folder,
            )
            if head is None
            else SolvedHead(head, self._classifier, guard, store, seed)
        )  # fmt: skip
        detect = DRIFT_DETECTORS.get(detector) if isinstance(detector, str) else detector
        self._drift = DriftMemory(detect)
        with owning(state_dir) as self._ownership:
            state = self._folder.load() or LearnerState(self._classifier.to_state())
            self._refuse_other_form(state.classifier)
            self.progress, self.record, self.rounds = state.progress, state.record, state.rounds
            self.adaptations, self._names = list(state.adaptations), SenderIds(state.names)
            self._memory = StreamMemory(
                store, guard, self.rule.learn, recent=state.recent, number=state.number, events=state.events,
                positions=state.positions,
            )  # fmt: skip
            self._restore(state)
            self._stream = Prequential(
                self._classifier, self.rule, self._memory, self._drift, self._names, self.progress,
                self.record,
            )  # fmt: skip
            self._stream.replay(self._log.since(state.events))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def model(self) -> nn.Module:
        """The model, in eval mode."""
        return self._classifier.model

    @property
    def reads(self) -> str:
        """Places that a head in closed form reads, ``last`` for the last layer; empty without such a head."""
        return self.rule.reads

    @property
    def classes(self) -> tuple[int, ...]:
        """Labels in the order of the model's outputs."""
        return self._classifier.classes.labels

    @property
    def positions(self) -> Mapping[str, Mapping[str, Any]]:
        """By source, the position up to which its samples have been read; see `observe_batch`."""
        return self._memory.positions

    def observe(self, x: Any, y: Any = None) -> Observation:
        """Predict a sample, keep it, and adapt the model if this is due.

        Parameters
        ----------
        x : array
            One sample; all samples have the same shape.
        y : int, optional
            Its label, any integer; None if it has not arrived yet, see `label`.

        Raises
        ------
        ElasticError
            If a setting does not fit the model. An invalid sample raises nothing: it is counted, and the reason is
            in ``refused``.
        """
        return self.observe_batch([x], [y])[0]

    def observe_batch(
        self,
        xs: Any,
        ys: Any = None,
        *,
        names: Sequence[str | None] | None = None,
        position: SourcePosition | None = None,
    ) -> list[Observation]:
        """Predict samples that arrive together, keep them, and adapt the model if this is due.

        This is faster than calls of `observe`, and has the same result with one difference: no training takes place
        between the samples of a batch. The trigger is checked after the last sample, whose observation says whether
        the model was adapted. If the process is killed, either all samples of the batch are known afterwards or
        none. A sample that is sent again with a label splits the batch in two, with the label between the parts.

        Parameters
        ----------
        xs : sequence of array
            Samples; an invalid one is refused and does not affect the others.
        ys : sequence of int, optional
            Their labels; None for those that have not arrived.
        names : sequence of str or None, optional
            The sender's names for them: a sample whose name is among the newest is recognised and not counted
            again. A label that comes with it is given to the sample, as by `label`.
        position : SourcePosition, optional
            How far their source has been read after the last of them; see `positions`.

        Raises
        ------
        StreamError
            If the numbers of samples, labels and names differ.
        """
        self.apply_round_result()
        left, seen = Arrivals.checked(xs, ys, names), list[Observation]()
        ends = False
        while not ends:
            some = self._stream.observe(left)
            left = left.after(len(some))
            late = some.pop() if some and some[-1].brings_label else None
            ends = late is None and not left.xs
            seen += self._taken_in(some, position if ends else None)
            if late is not None:
                seen.append(self._labelled_again(late))
        return seen

    def label(self, sample_id: int | str, y: int) -> Observation:
        """Give an observed sample its label, which may come late; its prediction now counts in the accuracy.

        If the store no longer holds the sample, its prediction counts all the same, but nothing is learned from it:
        ``sample_id`` is None, and ``progress.unlearned`` counts it.
        A second label for the same sample corrects the first: in the store, among the samples that are trained on
        next or held out, and in a head in closed form. It does not count in the accuracy. The sample is given by
        its id, or by the name that its sender gave it.
        """
        self._ownership.check()
        seen, facts, x = self._stream.label(sample_id, y)
        noted = self._log_event(facts, x)
        if seen.refused:
            return seen
        return self._adapt_or_save(seen if noted else replace(seen, sample_id=None))

    def tick(self) -> Observation:
        """Do what is due without a new sample, such as an adaptation that a restart has interrupted.

        Call it at the start, and from time to time while no sample arrives.
        """
        self.apply_round_result()
        return self._adapt_or_save(Observation())

    def adapt(self) -> Adaptation | None:
        """Adapt now; None if there is no labelled sample yet.

        For a head in closed form, adapting means to choose its penalty again, by the error on stored samples that
        are held out of its sums.
        """
        self._stream.learn_stored_labels()
        self._stream.update()
        done = self.rule.adapt(self._memory, self.progress)
        if done is None:
            return None
        if done.undone:
            _LOG.warning("an adaptation was undone: %s", done.undone)
        self.adaptations = [*self.adaptations, done][-self.options.history :]
        self._memory.adapted()
        self.progress.adapted(kept=not done.undone)
        self.save()
        return done

    def ids_of(self, label: int) -> list[int]:
        """Return the ids of all samples of a class that are stored or held out."""
        ids = self.store.ids().tolist()
        rows = [*self._memory.known(ids), *self._memory.held_out]
        return sorted({row.number for row in rows if row.y == label})

    def forget(self, sample_ids: Iterable[int | str], *, alpha: float | None = None) -> Forgotten:
        """Make the model forget samples, without training, and delete them wherever this learner keeps them.

        See `fl_elastic.forget` for what this can achieve. A head in closed form is afterwards exactly the one that
        it would be without the samples, which are subtracted from its sums. Samples without a label are only
        deleted, because nothing was learned from them. A sample that the store no longer holds cannot be forgotten.
        If the process dies meanwhile, call this again.

        Parameters
        ----------
        sample_ids : iterable of int or str
            Ids of the samples, or names that their sender gave them.
        alpha : float, optional
            Factor by which a weight must matter more to these samples than to all; by default derived from their
            share.

        Raises
        ------
        StreamError
            If none of the samples is here, the store holds no others, or the state could not be saved.
        UpdateError
            If ``alpha`` is invalid, or too large for this number of samples.
        """
        if isinstance(sample_ids, str) or not isinstance(sample_ids, Iterable):
            raise StreamError(f"ids {sample_ids!r} are not a list: give [{sample_ids!r}]")
        numbers = {number for sample_id in sample_ids if (number := self._stream.number(sample_id))}
        rows, classifier = self._memory.known(numbers), self._classifier
        if not rows or classifier.body is None:
            raise StreamError(
                "none of these samples is here: samples that are no longer stored cannot be forgotten"
            )
        learned = [row for row in rows if row.y is not None]
        kept = [row for row in self._memory.held_out if row.number not in numbers]
        before = [classifier.score(some) for some in (learned, kept)]
        weights, again = self.rule.forget(learned, self._memory, self.progress, alpha=alpha)
        self._stream.update(guarded=False)
        after = [classifier.score(some) for some in (learned, kept)]
        self._memory.recent.forget(numbers)
        # A round that began before has trained on them.
        rounds, self.rounds = self.rounds, self.rounds.without_earlier()
        # Save before erasing: the other way round, a failed save could not be repeated.
        if not self.save():
            self.rounds = rounds
            self.rule.learn_again(again)
            self._stream.update(guarded=False)
            raise StreamError(
                "the state could not be saved: is the disk full? Forget the samples again"
            )
        self.store.erase(numbers)
        self.rule.erased()
        return Forgotten(
            len(learned), len(rows), weights, before[0], after[0], before[1], after[1],
            exact=self.rule.exact,
        )  # fmt: skip

    def apply_round_result(self) -> bool:
        """Apply the result of a federation round unless it is worse; return whether there was a result.

        Called with each sample and each `tick`.
        """
        self._ownership.check()
        change = None if self._claimed else self._inbox.claim()
        if change is None:
            return False
        if self.rounds.last not in (change.name, change.after):
            _LOG.warning(
                "a round's result was left out: the round began before another round's result was applied, or "
                "before samples were forgotten"
            )
        elif self.rounds.last != change.name:
            undone = self.rule.apply_round_result(change, self._memory.held_out)
            if undone:
                _LOG.warning("a round's result was undone: %s", undone)
            self.rounds = self.rounds.with_one(change.name, undone=bool(undone))
        # The result's file is deleted once a saved state includes it.
        self._claimed = True
        self.save()
        return True

    def save(self) -> bool:
        """Save the state; return whether it was written. If not, the previous state stays.

        The order makes it safe to kill the process at any point: first the store's pending changes are written,
        then the state file is replaced, then the log of events is cleared (until then it is replayed for events
        that the state lacks), and last the result of a federation's round that the state now includes is deleted.
        """
        self._ownership.check()
        self._memory.settle()
        taken = self._folder.save(
            LearnerState(
                self._classifier.to_state(), self.rule.to_state(), self._memory.recent, self.progress,
                self.record, tuple(self.adaptations), self.rounds, self._log.events,
                self._memory.number, self.positions, self._names.known, self._drift.errors,
            )
        )  # fmt: skip
        self.progress.saves_failed += not taken
        if taken:
            self._log.saved()
        if taken and self._claimed:
            self._inbox.done()
            self._claimed = False
        self._stream.saved()
        return taken

    def close(self, *, save: bool = True) -> bool:
        """Save the state, restore the model, and unlock the folder; return whether the state was saved.

        The store is left open. With ``save`` false, or if a later learner has the folder, nothing is saved.
        """
        saved = save and self._ownership.holds and self.save()
        self._log.close()
        self._classifier.close()
        self._ownership.end()
        return saved

    def _taken_in(self, seen: list[Arrived], position: SourcePosition | None) -> list[Observation]:
        """Log samples that were taken in as one event, then adapt or save if it is time."""
        if position is not None:
            self._memory.reached(position)
        facts, x = noted_arrivals(seen, position)
        taken = {each.number for each in seen if each.number and not each.seen.again}
        if not self._log_event(facts, x):
            self._stream.drop(taken)
            seen = [each.unkept() if each.number in taken else each for each in seen]
        observations = [each.seen for each in seen]
        last = max((i for i, each in enumerate(seen) if each.number), default=None)
        if last is not None:
            every, now = self.options.save_every or sys.maxsize, self.progress.observed
            save = now // every > (now - len(taken)) // every
            observations[last] = self._adapt_or_save(observations[last], save=save)
        return observations

    def _labelled_again(self, late: Arrived) -> Observation:
        """Give a known sample the label with which it was sent again; return the observation for the label."""
        assert late.label is not None
        found = self.label(late.number, late.label)
        if found.correct is not None:
            return replace(found, again=True)
        # The sample already had a label, which this one corrects, or is no longer in the store.
        gone = found.refused == NO_SUCH_SAMPLE
        return replace(
            late.seen, sample_id=late.number if gone else found.sample_id,
            refused="" if gone else found.refused,
            adapted=found.adapted, rolled_back=found.rolled_back,
        )  # fmt: skip

    def _log_event(self, facts: Mapping[str, Any], x: Any) -> bool:
        """Write an event to the log before it is reported; return whether it survives a kill."""
        if not facts:
            return True
        self._memory.at_event(self._log.events + 1)
        noted = self._log.note(facts, x, learned=self.progress.observed > 0)
        if self._memory.is_full:
            self._memory.settle()
        return noted

    def _adapt_or_save(self, seen: Observation, *, save: bool = False) -> Observation:
        """Adapt or save if that is due; return the observation with the result."""
        undone = self._stream.update()
        if undone is not None:
            seen = replace(seen, adapted=not undone, rolled_back=bool(undone))
        if self.rule.is_due(self.progress):
            done = self.adapt()
            if done is not None:
                return replace(seen, adapted=not done.undone, rolled_back=bool(done.undone))
        if save or self._stream.unsaved or self._log.is_long:
            self.save()
        return seen

    def _refuse_other_form(self, saved: ClassifierState) -> None:
        """Raise StreamDataError if features were kept so far and inputs would be from now on, or vice versa."""
        every, inputs = (len(self.store.ids(labelled=False, version=v)) for v in (None, ""))
        begun = saved.like is not None
        features = every > inputs or (begun and saved.features is not None)
        if (every or begun) and features == self._classifier.keeps_inputs:
            raise StreamDataError(
                f"{'features' if features else 'inputs'} of samples were kept in {self._folder.path} so far: give "
                "the learner the same latent or head (--latent, --closed-form) as before, or another state_dir"
            )

    def _restore(self, state: LearnerState) -> None:
        """Restore what learns, and the features that it learns from."""
        known = state.classifier.classes
        if self.classes != known[: len(self.classes)]:
            raise StreamDataError(
                f"the saved classes begin with {list(known[: len(self.classes)])}, not {list(self.classes)}: leave "
                "classes= as it was, since further labels follow as they appear, or give another state_dir"
            )
        self._drift.restore(state.errors)
        features = state.classifier.features
        self._classifier.restore(state.classifier)
        self._memory.keep_to(self._classifier.version, features)
        self.rule.restore(state.rule, same_features=self._classifier.version == features)


def _check_closed_form(head: ClosedForm, latent: Latent | None, store: SampleStore) -> None:
    """Raise StreamError unless features can be added to the sums and subtracted exactly."""
    if not isinstance(head, ClosedForm):
        raise StreamError(
            f"head {head!r} is invalid: give ClosedForm(), or leave it out to train by steps"
        )
    if latent is not None:
        raise StreamError(
            "a head in closed form freezes all that is below it: leave latent out, or train by steps without head"
        )
    if store.encoding not in ("raw", "fp16"):
        raise StreamError(
            f"features as {store.encoding} change when they are written a second time, so that none could be "
            "subtracted exactly: give the store the encoding raw or fp16"
        )


def _no_steps(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    raise AssertionError("a head in closed form takes no steps")


def _class_number(label: object) -> int:
    """Return the label of a class that is known from the start; raise StreamError if it is none."""
    try:
        number = checked_label(label)
    except Refused as error:
        raise StreamError(str(error)) from None
    if number is None:
        raise StreamError(f"the label {label!r} is not a class number: number the classes")
    return number
