"""Conformance checks of scores of groups and of channels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fl_elastic.errors import TrainingError
from fl_elastic.groups.trace import trace_step
from fl_elastic.groups.untouched import untouched
from fl_elastic.planning.importance import ChannelScore, Importance, Probe
from fl_elastic.planning.importance.channels import ChannelScores
from fl_elastic.testing.probes import MadeUpTraining, Snapshot, made_up_training
from fl_elastic.testing.subjects import Check, instance_of, require

_Scored = Callable[[Any, Probe, MadeUpTraining], NDArray[np.float64]]
"""Returns all scores of a subject for a probe of a training, as one array."""
Subject = type[Importance] | Importance
ChannelSubject = type[ChannelScore] | ChannelScore


def importance_checks() -> list[Check]:
    """Return the checks of a score; each takes the class or an instance and raises AssertionError.

    Examples
    --------
    >>> from fl_elastic.planning.importance.channel_scores import FisherImportance
    >>> for check in importance_checks():
    ...     check(FisherImportance)
    """
    return [
        check_scores_are_finite_and_one_per_group,
        *_probe_checks(lambda subject, probe, _: np.asarray(instance_of(subject).score(probe))),
        check_asked_batches_suffice,
        check_scores_follow_their_groups,
    ]


def check_scores_are_finite_and_one_per_group(subject: Subject) -> None:
    """Check that the score is a vector of finite numbers, one per group."""
    for training in _trainings():
        probe = _probe_of(subject, training)
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
    """Check that scoring only some of the groups gives one score for each of them."""
    training = made_up_training()
    probe = _probe_of(subject, training)
    for groups in (probe.groups[:1], probe.groups[2:4]):
        scores = instance_of(subject).score(replace(probe, groups=groups))
        require(len(scores) == len(groups), f"{len(scores)} scores for {len(groups)} groups")


def _probe_checks(scored: _Scored) -> list[Check]:
    """Return the checks of a kind of score, given a function that computes a subject's scores."""

    def check_probe_leaves_no_trace(subject: Any) -> None:
        """Check that scoring leaves model, modes, gradients, optimiser and random states unchanged bit for bit."""
        for training in _trainings():
            probe = _probe_of(subject, training)
            before = Snapshot(training.model, training.optimizer)
            scored(subject, probe, training)
            require(not before.differences(), f"scoring changed {before.differences()}")

    def check_failed_probe_leaves_no_trace(subject: Any) -> None:
        """Check that NaN in a batch raises TrainingError or is ignored, and that nothing is left changed."""
        for training in _trainings():
            probe = _probe_of(subject, training)
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
        for training in _trainings():
            seen = []
            for _ in range(2):
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(1)
                    seen.append(scored(subject, _probe_of(subject, training), training))
            require(np.array_equal(seen[0], seen[1]), "the same seed gives two sets of scores")

    return [
        check_probe_leaves_no_trace,
        check_failed_probe_leaves_no_trace,
        check_scores_are_reproducible_from_seed,
    ]


def _trainings() -> Iterator[MadeUpTraining]:
    """Yield synthetic models in training, with optimisers of different state."""
    yield made_up_training("sgd")
    yield made_up_training("adam", seed=1)


def _probe_of(subject: Any, training: MadeUpTraining) -> Probe:
    """Return a probe with as many batches as the subject asks for."""
    return training.probe(instance_of(subject).batches_needed)


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
        *_probe_checks(lambda subject, probe, training: _flat(_scores(subject, probe, training))),
        check_channel_scores_follow_their_groups,
    ]


def check_scores_are_finite_and_one_per_channel(subject: ChannelSubject) -> None:
    """Check that every convolution and linear layer has one finite number per channel."""
    for training in _trainings():
        probe = _probe_of(subject, training)
        found = _scores(subject, probe, training)
        for group in probe.groups:
            name = group.parameters[0].rpartition(".")[0]
            module = probe.model.get_submodule(name)
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                require(group.name in found, f"layer {group.name!r} has no scores")
                _require_scores(found[group.name], module)


def check_channel_scores_follow_their_groups(subject: ChannelSubject) -> None:
    """Check that only the probe's groups are scored, under their own names."""
    training = made_up_training()
    probe = _probe_of(subject, training)
    for groups in (probe.groups[:1], probe.groups[2:4]):
        found = _scores(subject, replace(probe, groups=groups), training)
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


def _scores(
    subject: ChannelSubject, probe: Probe, training: MadeUpTraining
) -> Mapping[str, ChannelScores]:
    with untouched(probe.model, probe.loss_fn):
        graph = trace_step(probe.model, probe.loss_fn, training.batches[0]).graph
    return instance_of(subject).score(probe, graph)
