"""Conformance checks of channel scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from torch import nn

from fl_elastic.groups.trace import trace_step
from fl_elastic.groups.untouched import untouched
from fl_elastic.planning.importance import ChannelScore, Probe
from fl_elastic.planning.importance.channels import ChannelScores
from fl_elastic.testing.probe_checks import probe_checks, probe_of, trainings
from fl_elastic.testing.probes import MadeUpTraining, made_up_training
from fl_elastic.testing.subjects import Check, instance_of, require

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
        *probe_checks(lambda subject, probe, training: _flat(_scores(subject, probe, training))),
        check_scores_follow_their_groups,
    ]


def check_scores_are_finite_and_one_per_channel(subject: Subject) -> None:
    """Check that every convolution and linear layer has one finite number per channel."""
    for training in trainings():
        probe = probe_of(subject, training)
        found = _scores(subject, probe, training)
        for group in probe.groups:
            name = group.parameters[0].rpartition(".")[0]
            module = probe.model.get_submodule(name)
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                require(group.name in found, f"layer {group.name!r} has no scores")
                _require_scores(found[group.name], module)


def check_scores_follow_their_groups(subject: Subject) -> None:
    """Check that only the probe's groups are scored, under their own names."""
    training = made_up_training()
    probe = probe_of(subject, training)
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
    subject: Subject, probe: Probe, training: MadeUpTraining
) -> Mapping[str, ChannelScores]:
    with untouched(probe.model, probe.loss_fn):
        graph = trace_step(probe.model, probe.loss_fn, training.batches[0]).graph
    return instance_of(subject).score(probe, graph)
