"""Conformance of importance scores: what every probe must satisfy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from fl_elastic.errors import TrainingError
from fl_elastic.planning.importance import Importance, Probe
from fl_elastic.testing.probes import MadeUpTraining, Snapshot, made_up_training
from fl_elastic.testing.subjects import Check, instance_of, require

__all__ = ["importance_checks"]

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
        check_probe_leaves_no_trace,
        check_failed_probe_leaves_no_trace,
        check_scores_are_reproducible_from_seed,
        check_asked_batches_suffice,
        check_scores_follow_their_groups,
    ]


def check_scores_are_finite_and_one_per_group(subject: Subject) -> None:
    """Check that the score is a vector of finite numbers, one per group."""
    for training in _trainings():
        probe = _probe(subject, training)
        scores = np.asarray(instance_of(subject).score(probe))
        require(scores.shape == (len(probe.groups),), f"scores of shape {scores.shape}")
        require(np.issubdtype(scores.dtype, np.floating), f"scores of dtype {scores.dtype}")
        require(bool(np.isfinite(scores).all()), f"scores are not finite: {scores}")


def check_probe_leaves_no_trace(subject: Subject) -> None:
    """Check that model, modes, gradients, optimiser and randomness are the same bit for bit."""
    for training in _trainings():
        probe = _probe(subject, training)
        before = Snapshot(training.model, training.optimizer)
        instance_of(subject).score(probe)
        require(not before.differences(), f"the probe changed {before.differences()}")


def check_failed_probe_leaves_no_trace(subject: Subject) -> None:
    """Check that NaN in a batch is a TrainingError or is ignored, and leaves no trace."""
    for training in _trainings():
        probe = _probe(subject, training)
        broken = [(torch.full_like(x, float("nan")), y) for x, y in probe.batches]
        before = Snapshot(training.model, training.optimizer)
        try:
            scores = instance_of(subject).score(replace(probe, batches=broken))
            require(
                bool(np.isfinite(scores).all()), "NaN in a batch gives NaN scores, not an error"
            )
        except TrainingError:
            pass
        require(not before.differences(), f"the failed probe changed {before.differences()}")


def check_scores_are_reproducible_from_seed(subject: Subject) -> None:
    """Check that all randomness comes from the probe's generator and torch's random state."""
    for training in _trainings():
        scores = []
        for _ in range(2):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(1)
                scores.append(instance_of(subject).score(_probe(subject, training)))
        require(
            np.array_equal(scores[0], scores[1]), f"the same seed gives {scores[0]} and {scores[1]}"
        )


def check_asked_batches_suffice(subject: Subject) -> None:
    """Check that ``batches_needed`` is a whole number, and that many batches are enough."""
    needed = instance_of(subject).batches_needed
    require(isinstance(needed, int) and needed >= 0, f"batches_needed is {needed!r}")
    training = made_up_training(batches=max(needed, 2))
    scores = instance_of(subject).score(training.probe(needed))
    require(bool(np.isfinite(scores).all()), f"{needed} batches give scores that are not finite")


def check_scores_follow_their_groups(subject: Subject) -> None:
    """Check that scoring some of the groups gives as many scores."""
    training = made_up_training()
    probe = _probe(subject, training)
    for groups in (probe.groups[:1], probe.groups[2:4]):
        scores = instance_of(subject).score(replace(probe, groups=groups))
        require(len(scores) == len(groups), f"{len(scores)} scores for {len(groups)} groups")


def _trainings() -> Iterator[MadeUpTraining]:
    yield made_up_training("sgd")
    yield made_up_training("adam", seed=1)


def _probe(subject: Subject, training: MadeUpTraining) -> Probe:
    return training.probe(instance_of(subject).batches_needed)
