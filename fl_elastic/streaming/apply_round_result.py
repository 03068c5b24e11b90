"""Apply a federation round's result to the learner's model, unless the held-out window gets worse."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fl_elastic.streaming.classifier import Classifier
from fl_elastic.streaming.guard import Guard, Row
from fl_elastic.streaming.intake import Refused
from fl_elastic.streaming.labelled_weights import LabelledWeights
from fl_elastic.streaming.round_inbox import RoundChange, applied
from fl_elastic.update import Manifest, load_weights


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
        if all(np.isfinite(each).all() for each in weights.values() if each.dtype.kind == "f"):
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
