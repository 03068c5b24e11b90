"""Checks that hold for every score computed from a probe, of tensor groups or of channels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fl_elastic.errors import TrainingError
from fl_elastic.planning.importance import Probe
from fl_elastic.testing.probes import MadeUpTraining, Snapshot, made_up_training
from fl_elastic.testing.subjects import Check, instance_of, require

Scored = Callable[[Any, Probe, MadeUpTraining], NDArray[np.float64]]
"""Returns all scores, as one array, that a subject gives to a probe of a training."""


def probe_checks(scored: Scored) -> list[Check]:
    """Return the checks of a kind of score, given a function that computes a subject's scores."""

    def check_probe_leaves_no_trace(subject: Any) -> None:
        """Check that scoring leaves model, modes, gradients, optimiser and random states unchanged bit for bit."""
        for training in trainings():
            probe = probe_of(subject, training)
            before = Snapshot(training.model, training.optimizer)
            scored(subject, probe, training)
            require(not before.differences(), f"scoring changed {before.differences()}")

    def check_failed_probe_leaves_no_trace(subject: Any) -> None:
        """Check that NaN in a batch raises TrainingError or is ignored, and that nothing is left changed."""
        for training in trainings():
            probe = probe_of(subject, training)
            broken = [(torch.full_like(x, float("nan")), y) for x, y in probe.batches]
            before = Snapshot(training.model, training.optimizer)
            try:
                found = scored(subject, replace(probe, batches=broken), training)
                require(bool(np.isfinite(found).all()), "NaN in a batch gives NaN, not an error")
            except TrainingError:
                pass
            require(not before.differences(), f"failed scoring changed {before.differences()}")

    def check_scores_are_reproducible_from_seed(subject: Any) -> None:
        """Check that all randomness comes from the probe's generator and torch's random state."""
        for training in trainings():
            seen = []
            for _ in range(2):
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(1)
                    seen.append(scored(subject, probe_of(subject, training), training))
            require(np.array_equal(seen[0], seen[1]), "the same seed gives two sets of scores")

    return [
        check_probe_leaves_no_trace,
        check_failed_probe_leaves_no_trace,
        check_scores_are_reproducible_from_seed,
    ]


def trainings() -> Iterator[MadeUpTraining]:
    """Yield made-up models in training, with optimisers of different state."""
    yield made_up_training("sgd")
    yield made_up_training("adam", seed=1)


def probe_of(subject: Any, training: MadeUpTraining) -> Probe:
    """Return a probe with as many batches as the subject asks for."""
    return training.probe(instance_of(subject).batches_needed)
