"""The last saved state of a stream's learner, from which a round of the federation trains."""

from __future__ import annotations

import copy
import sqlite3
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fl_elastic.closed_form.folds import FOLDS, Fold
from fl_elastic.closed_form.head_sums import HeadSums
from fl_elastic.closed_form.running_sums import RunningSums
from fl_elastic.errors import ArchiveError, StoreError, StreamError
from fl_elastic.groups import Batch, LossFn
from fl_elastic.groups.untouched import preserved_rng
from fl_elastic.state.archive import Kind
from fl_elastic.state.codec import read_state, write_state
from fl_elastic.streaming.body import Body, Prepare, Upper
from fl_elastic.streaming.classifier import Classifier
from fl_elastic.streaming.growing_head import head_name
from fl_elastic.streaming.guard import Row
from fl_elastic.streaming.labelled_weights import LabelledWeights
from fl_elastic.streaming.latent import Latent
from fl_elastic.streaming.learner_state import StateFolder
from fl_elastic.streaming.progress import Progress
from fl_elastic.streaming.replay_loader import OnePass, Pool, ReplayLoader
from fl_elastic.streaming.round_inbox import RoundsTaken
from fl_elastic.streaming.solved_head_state import saved_sums
from fl_elastic.streaming.store.sample_store import SampleStore, settings_of
from fl_elastic.streaming.stream_options import Replay
from fl_elastic.streaming.write_ahead import labelled_since
from fl_elastic.training.sums_size import held_out

_STORE, _POSITION = "samples.db", "position.state"
_POSITION_KIND = Kind("fl_elastic.stream_position")
_NEWEST = 512
_ROOM = 16 * 2**20
# A smaller share of the examples is treated as rounding error.
_NOTHING = 1e-6


@dataclass(frozen=True, eq=False)
class SavedLearner:
    """The last saved state of a learner; everything is a copy except the store, which is shared.

    Parameters
    ----------
    classifier : Classifier
        A copy of the learner's model, with all classes that occur in the state or the store.
    saved : LabelledWeights
        The saved weights of the model.
    progress : Progress
        Counters of the learner.
    rounds : RoundsTaken
        Record of earlier rounds whose results the learner has applied.
    held_out, new : sequence of Row
        The held-out window, and the samples that the learner has not trained on yet.
    unlearned : collection of int
        Numbers of the samples that are not in ``sums``: those without a label, held out, or forgotten.
    number : int
        Number of the newest sample.
    store : SampleStore
        Open for reading.
    sums : RunningSums, optional
        Sums of the head, if it is in closed form.
    fades : bool
        Whether older samples have less weight in the sums.
    labelled_since : callable
        Returns the numbers of the samples whose labels came or changed after the state was saved.
    """

    classifier: Classifier
    saved: LabelledWeights
    progress: Progress
    rounds: RoundsTaken
    held_out: Sequence[Row]
    new: Sequence[Row]
    unlearned: Collection[int]
    number: int
    store: SampleStore
    sums: RunningSums | None = None
    fades: bool = False
    labelled_since: Callable[[], Collection[int]] = frozenset

    @property
    def body(self) -> Body:
        """The body, which turns samples into inputs of the model."""
        assert self.classifier.body is not None
        return self.classifier.body

    @property
    def upper(self) -> Upper | None:
        """The part above the place where the learner keeps features; None if it keeps inputs."""
        return self.body if isinstance(self.body, Upper) else None

    @property
    def trained(self) -> nn.Module:
        """The module that takes the body's inputs, with tensors under their names in the whole model."""
        return self.classifier.model if self.upper is None else self.upper.by_its_names()

    @property
    def samples(self) -> int:
        """Number of labelled samples that are not held out."""
        return len(self.store.ids(version=self.classifier.version)) + len(self._beside_store())

    def loader(
        self, replay: Replay, steps: int, seed: tuple[int, ...], position: StreamPosition
    ) -> ReplayLoader:
        """Return batches of samples that came after the position, mixed with stored ones.

        Raises
        ------
        StreamError
            If there is no labelled sample.
        """
        if not self.new and not self.store.classes.keys() - {None}:
            raise StreamError(
                "the stream has no labelled sample yet: take part once labels have come"
            )
        x, y = self._since(position)
        pool = Pool(x, y, self.store, self.classifier.classes, self.classifier.version)
        return ReplayLoader(pool, replay, steps, seed, self.body.as_inputs)

    def every_sample(self, labels: Sequence[int], size: int) -> OnePass:
        """Return each labelled sample once, in batches of ``size``; the target is its label's index in ``labels``.

        Raises
        ------
        StreamError
            If no sample has one of these labels.
        """
        rest = self._beside_store()
        x = np.stack([row.x for row in rest]) if rest else np.zeros(0, np.float32)
        y = np.array([row.y for row in rest], np.int64)
        pool = Pool(x, y, self.store, self.classifier.classes, self.classifier.version)
        return OnePass(pool, labels, size, self.body.as_inputs)

    def head_sums(self, weight: str, labels: Sequence[int]) -> HeadSums | None:
        """Return the sums of a head in closed form as they are sent, without a pass over all samples.

        Some stored samples are kept apart in folds, for the choice of the penalty, unless older samples have less
        weight.

        Parameters
        ----------
        weight : str
            Name of the head's weight.
        labels : sequence of int
            Labels of the columns. The result is None without sums, and also if the sums include samples of other
            labels, because these cannot be separated.
        """
        known, sums = self.classifier.classes, self.sums
        if sums is None or sums.weight < 1:
            return None
        # A column has samples if it exceeds rounding error; the model may have more labels by now.
        filled = np.flatnonzero(sums.targets[-1] > min(0.5, _NOTHING * sums.weight)).tolist()
        if any(known.label(place) not in labels for place in filled):
            return None
        places = {known.label(place): place for place in filled}
        found = sums.head_sums(weight, [places.get(label, -1) for label in labels])
        return found if self.fades else found.with_folds(self._folds(sums, labels))

    def _folds(self, sums: RunningSums, labels: Sequence[int]) -> tuple[Fold, ...]:
        """Return at most five folds of stored samples, as many samples as clients without a stream hold out."""
        draw = np.random.default_rng(self.number)
        ids = self.store.draw(
            held_out(len(sums.origin)), version=self.classifier.version, generator=draw
        )
        # Samples that came after the state was saved, or were not learned by then, are not in the sums, and samples
        # relabelled since are in them with the earlier label. Neither can be subtracted from the total as a fold.
        ours = {each for each in ids.tolist() if each <= self.number} - {*self.unlearned}
        found = self.store.take(sorted(ours))
        # Called after the labels were read, because a label is in the log before it is in the store.
        same = ~np.isin(found.ids, [*self.labelled_since()])
        wanted = np.array([labels.index(each) for each in found.y[same].tolist()], np.int64)
        targets, rows = np.eye(len(labels))[wanted], np.asarray(found.x, np.float64)[same]
        parts = range(min(FOLDS, len(rows)))
        return tuple(Fold.of(rows[part::FOLDS], targets[part::FOLDS]) for part in parts)

    def held_out_batch(self) -> Batch:
        """Return the held-out window as one batch; raise StreamError if it is empty."""
        if not self.held_out:
            raise StreamError("no sample is held out yet: evaluate once more labels have come")
        inputs = self.body.as_inputs(np.stack([row.x for row in self.held_out]))
        labels = np.array([row.y for row in self.held_out], np.int64)
        return inputs, torch.from_numpy(self.classifier.classes.outputs(labels))

    def untrained(self) -> list[Row]:
        """Return the newest samples that the learner's model was not trained on, including the held-out window."""
        return [*self.held_out, *self.new][-_NEWEST:]

    def position(self, before: StreamPosition) -> StreamPosition:
        """Return the present position in the stream, after one more round than ``before``."""
        progress = self.progress
        return StreamPosition(
            progress.observed,
            progress.labelled,
            progress.drifts,
            self.number,
            before.rounds + 1,
        )

    def _beside_store(self) -> list[Row]:
        """Return the samples of the saved state that are not in the store."""
        there = {*self.store.ids(version=self.classifier.version).tolist()}
        return [row for row in self.new if row.number not in there]

    def _since(self, position: StreamPosition) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the samples that came after a position, each once, from the store and the saved state."""
        stored = self.store.take(self.store.ids()[-_NEWEST:].tolist())
        late = np.flatnonzero(stored.ids > position.newest)
        there = set(stored.ids[late].tolist())
        rest = [row for row in self.new if row.number not in there]
        x = [*stored.x[late], *(row.x for row in rest)]
        y = [*stored.y[late].tolist(), *(row.y for row in rest)]
        return np.stack(x) if x else np.zeros(0, np.float32), np.array(y, np.int64)


def open_store(path: Path) -> SampleStore:
    """Open an existing store with the settings it was made with.

    Raises
    ------
    StoreError
        If there is no store, or it cannot be read.
    """
    if not path.is_file():
        raise StoreError(f"there is no sample store {path}: start fl-elastic stream there first")
    try:
        kept = settings_of(path)
        policy, encoding, seed = (kept[key] for key in ("policy", "encoding_name", "seed"))
    except (sqlite3.Error, KeyError) as error:
        raise StoreError(f"cannot read the sample store {path}: {error}") from None
    # No samples are added through this object, so any capacity that exceeds the file, which may still grow, will
    # do.
    capacity = 2 * path.stat().st_size + _ROOM
    return SampleStore(path, capacity, policy=policy, encoding=encoding, seed=int(seed))


def load_snapshot(
    folder: Path,
    model: nn.Module,
    loss_fn: LossFn,
    *,
    prepare: Prepare,
    seed: int = 0,
) -> SavedLearner:
    """Return the last saved state of a learner; the caller closes its store.

    Parameters
    ----------
    folder : Path
        The learner's state folder, with the store ``samples.db`` in it.
    model : nn.Module
        Model of the learner's architecture; it is copied.
    loss_fn, prepare, seed
        See `StreamLearner`.

    Raises
    ------
    StreamError
        If nothing was saved yet, or the state or its features belong to another model.
    StoreError
        If there is no store.
    """
    state = StateFolder(folder).load()
    if state is None:
        raise StreamError(f"nothing was learned in {folder} yet: start fl-elastic stream there")
    kept, solved = state.classifier, state.rule.head
    classifier = Classifier(
        _with_outputs(model, kept.outputs), loss_fn, (),
        latent=None if kept.groups_above is None else Latent(kept.groups_above), prepare=prepare, seed=seed,
        last_layer=solved is not None,
    )  # fmt: skip
    classifier.restore(kept)
    if classifier.version != kept.features:
        raise StreamError(
            f"the learner keeps features of frozen part {kept.features}, the model has frozen part "
            f"{classifier.version}: give the client the learner's model"
        )
    saved = LabelledWeights.of(classifier)
    store = open_store(folder / _STORE)
    for label in store.classes:
        if label is not None:
            classifier.learn(label)
    return SavedLearner(
        classifier=classifier,
        saved=saved,
        progress=state.progress,
        rounds=state.rounds,
        held_out=state.recent.held_out,
        new=[*state.recent.new][-_NEWEST:],
        unlearned={
            *state.recent.waiting,
            *(row.number for row in state.recent.held_out),
            *(() if solved is None else solved.gone),
        },
        number=state.number,
        store=store,
        sums=None if solved is None else saved_sums(solved),
        fades=solved is not None and solved.remember is not None,
        labelled_since=partial(labelled_since, folder, state.events),
    )


def _with_outputs(model: nn.Module, outputs: int | None) -> nn.Module:
    """Return a copy with at most ``outputs`` outputs: the learner may have begun with fewer than the server."""
    made = copy.deepcopy(model)
    name = head_name(made)
    layer = made.get_submodule(name)
    if outputs is not None and isinstance(layer, nn.Linear) and layer.out_features > outputs:
        parent, _, own = name.rpartition(".")
        # The weights are loaded later; drawing initial ones must not change the random state.
        with preserved_rng():
            shorter = nn.Linear(layer.in_features, outputs, bias=layer.bias is not None)
        setattr(made.get_submodule(parent), own, shorter.to(layer.weight).train(layer.training))
    return made


@dataclass(frozen=True)
class StreamPosition:
    """Position of a stream at the last round; later samples are new to the federation.

    Parameters
    ----------
    observed, labelled, drifts : int
        Counters of `Progress`.
    newest : int
        Number of the newest sample, which is its id in the store.
    rounds : int
        Number of rounds so far.
    """

    observed: int = 0
    labelled: int = 0
    drifts: int = 0
    newest: int = 0
    rounds: int = 0

    @classmethod
    def load(cls, folder: Path) -> StreamPosition:
        """Return the position saved in a learner's folder; if there is none, the beginning of the stream."""
        try:
            return read_state(cls, folder / _POSITION, _POSITION_KIND)
        except (OSError, ArchiveError):
            return cls()

    def save(self, folder: Path) -> None:
        """Save it in a learner's folder; raise OSError if that fails."""
        write_state(folder / _POSITION, _POSITION_KIND, self)
