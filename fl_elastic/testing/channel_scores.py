"""Conformance of channel scores: what every score must satisfy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from fl_elastic.errors import TrainingError
from fl_elastic.groups.graph import BackwardGraph
from fl_elastic.groups.trace import trace_step
from fl_elastic.groups.untouched import untouched
from fl_elastic.planning.importance import ChannelScore, Probe
from fl_elastic.planning.importance.channels import ChannelScores
from fl_elastic.testing.probes import MadeUpTraining, Snapshot, made_up_training
from fl_elastic.testing.subjects import Check, instance_of, require

__all__ = ["channel_score_checks"]

Subject = type[ChannelScore] | ChannelScore


def channel_score_checks() -> list[Check]:
    """Return the checks of a channel score; each takes the class or an instance and raises AssertionError.

    Examples
    --------
    >>> from fl_elastic.planning.importance import CHANNEL_SCORES
    >>> for check in channel_score_checks():
    ...     check(CHANNEL_SCORES.make("l2"))
    """
    return [
        check_scores_are_finite_and_one_per_channel,
        check_scoring_leaves_no_trace,
        check_failed_scoring_leaves_no_trace,
        check_scores_are_reproducible_from_seed,
        check_scores_follow_their_groups,
    ]


def check_scores_are_finite_and_one_per_channel(subject: Subject) -> None:
    """Check that every convolution and linear layer has one finite number per channel."""
    for training in _trainings():
        probe, graph = _probe(subject, training)
        found = instance_of(subject).score(probe, graph)
        for group in probe.groups:
            name = group.parameters[0].rpartition(".")[0]
            module = probe.model.get_submodule(name)
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                require(group.name in found, f"layer {group.name!r} has no scores")
                _require_scores(found[group.name], module)


def check_scoring_leaves_no_trace(subject: Subject) -> None:
    """Check that model, modes, gradients, optimiser and randomness are the same bit for bit."""
    for training in _trainings():
        probe, graph = _probe(subject, training)
        before = Snapshot(training.model, training.optimizer)
        instance_of(subject).score(probe, graph)
        require(not before.differences(), f"scoring changed {before.differences()}")


def check_failed_scoring_leaves_no_trace(subject: Subject) -> None:
    """Check that NaN in a batch is a TrainingError or is ignored, and leaves no trace."""
    for training in _trainings():
        probe, graph = _probe(subject, training)
        broken = [(torch.full_like(x, float("nan")), y) for x, y in probe.batches]
        before = Snapshot(training.model, training.optimizer)
        try:
            found = instance_of(subject).score(replace(probe, batches=broken), graph)
            require(bool(np.isfinite(_flat(found)).all()), "NaN in a batch gives NaN, not an error")
        except TrainingError:
            pass
        require(not before.differences(), f"failed scoring changed {before.differences()}")


def check_scores_are_reproducible_from_seed(subject: Subject) -> None:
    """Check that all randomness comes from the probe's generator and torch's random state."""
    for training in _trainings():
        seen = []
        for _ in range(2):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(1)
                seen.append(_flat(instance_of(subject).score(*_probe(subject, training))))
        require(np.array_equal(seen[0], seen[1]), "the same seed gives two sets of scores")


def check_scores_follow_their_groups(subject: Subject) -> None:
    """Check that only groups of the probe are scored, under their own names."""
    training = made_up_training()
    probe, graph = _probe(subject, training)
    for groups in (probe.groups[:1], probe.groups[2:4]):
        found = instance_of(subject).score(replace(probe, groups=groups), graph)
        names = {group.name for group in groups}
        require(set(found) <= names, f"scores of {sorted(found)}, asked for {sorted(names)}")


def _require_scores(found: ChannelScores, module: nn.Conv2d | nn.Linear) -> None:
    linear = isinstance(module, nn.Linear)
    counts = (
        module.in_features if linear else module.in_channels,
        module.out_features if linear else module.out_channels,
    )
    for axis, scores, count in zip(
        ("input", "output"), (found.inputs, found.outputs), counts, strict=True
    ):
        if scores is None:
            raise AssertionError(f"there are no {axis} scores")
        require(scores.shape == (count,), f"{axis} scores of shape {scores.shape}, not ({count},)")
        require(bool(np.isfinite(scores).all()), f"{axis} scores are not finite")


def _flat(found: Mapping[str, ChannelScores]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    arrays = [a for scores in found.values() for a in (scores.inputs, scores.outputs)]
    return np.concatenate([np.zeros(0), *(array for array in arrays if array is not None)])


def _trainings() -> Iterator[MadeUpTraining]:
    yield made_up_training("sgd")
    yield made_up_training("adam", seed=1)


def _probe(subject: Subject, training: MadeUpTraining) -> tuple[Probe, BackwardGraph]:
    probe = training.probe(instance_of(subject).batches_needed)
    with untouched(training.model):
        graph = trace_step(training.model, probe.loss_fn, training.batches[0]).graph
    return probe, graph
