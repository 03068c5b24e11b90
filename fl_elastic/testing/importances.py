"""Conformance checks of importance scores."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fl_elastic.planning.importance import Importance
from fl_elastic.testing.probe_checks import probe_checks, probe_of, trainings
from fl_elastic.testing.probes import made_up_training
from fl_elastic.testing.subjects import Check, instance_of, require

Subject = type[Importance] | Importance


def importance_checks() -> list[Check]:
    """Return the checks of a score; each takes the class or an instance and raises AssertionError.

    Examples
    --------
    >>> from fl_elastic.planning.importance.fisher import FisherImportance
    >>> for check in importance_checks():
    ...     check(FisherImportance)
    """
    return [
        check_scores_are_finite_and_one_per_group,
        *probe_checks(lambda subject, probe, _: np.asarray(instance_of(subject).score(probe))),
        check_asked_batches_suffice,
        check_scores_follow_their_groups,
    ]


def check_scores_are_finite_and_one_per_group(subject: Subject) -> None:
    """Check that the score is a vector of finite numbers, one per group."""
    for training in trainings():
        probe = probe_of(subject, training)
        scores = np.asarray(instance_of(subject).score(probe))
        require(scores.shape == (len(probe.groups),), f"scores of shape {scores.shape}")
        require(np.issubdtype(scores.dtype, np.floating), f"scores of dtype {scores.dtype}")
        require(bool(np.isfinite(scores).all()), f"scores are not finite: {scores}")


def check_asked_batches_suffice(subject: Subject) -> None:
    """Check that ``batches_needed`` is an integer, and that this many batches suffice."""
    needed = instance_of(subject).batches_needed
    require(isinstance(needed, int) and needed >= 0, f"batches_needed is {needed!r}")
    training = made_up_training(batches=max(needed, 2))
    scores = instance_of(subject).score(training.probe(needed))
    require(bool(np.isfinite(scores).all()), f"{needed} batches give scores that are not finite")


def check_scores_follow_their_groups(subject: Subject) -> None:
    """Check that scoring a part of the groups gives one score for each of them."""
    training = made_up_training()
    probe = probe_of(subject, training)
    for groups in (probe.groups[:1], probe.groups[2:4]):
        scores = instance_of(subject).score(replace(probe, groups=groups))
        require(len(scores) == len(groups), f"{len(scores)} scores for {len(groups)} groups")
