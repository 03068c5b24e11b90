"""Conformance of learned selectors: what a score must satisfy that sees a set through its summary alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fl_elastic.groups import Mode
from fl_elastic.groups.graph import BackwardGraph
from fl_elastic.groups.trace import trace_step
from fl_elastic.groups.untouched import untouched
from fl_elastic.methods.learned_selector.set_summary import SummaryScore, summarise
from fl_elastic.planning.importance import Probe
from fl_elastic.planning.importance.channels import ChannelScores, choose_channels
from fl_elastic.testing.importances import channel_score_checks
from fl_elastic.testing.probes import made_up_training
from fl_elastic.testing.subjects import Check, instance_of, require

Subject = type[SummaryScore] | SummaryScore
Change = Callable[[Tensor], Tensor]


def selector_checks() -> list[Check]:
    """Return the checks of a learned selector: those of every channel score, and that it is one.

    Each takes the class or an instance and raises AssertionError.
    """
    return [
        *channel_score_checks(),
        check_order_of_examples_does_not_matter,
        check_it_takes_no_backward_pass,
        check_scores_depend_on_the_set,
        check_masks_keep_to_their_modes,
    ]


def check_order_of_examples_does_not_matter(subject: Subject) -> None:
    """Check that a set is a set: its examples in another order have the same scores."""
    probe, graph = _probe()
    first = instance_of(subject).score(probe, graph)
    turned = _with_inputs(probe, lambda inputs: inputs.flip(0), lambda targets: targets.flip(0))
    again = instance_of(subject).score(turned, graph)
    _require_like(first, again, "examples in another order have other scores")


def check_it_takes_no_backward_pass(subject: Subject) -> None:
    """Check that scores are the same where torch records nothing to go backwards through."""
    probe, graph = _probe()
    first = instance_of(subject).score(probe, graph)
    with torch.no_grad():
        again = instance_of(subject).score(probe, graph)
    _require_like(first, again, "without gradients scores are others")


def check_scores_depend_on_the_set(subject: Subject) -> None:
    """Check that another set has other scores: else nothing need be looked at."""
    probe, graph = _probe()
    first = instance_of(subject).score(probe, graph)
    other = _with_inputs(
        probe, lambda inputs: 2.0 * inputs.roll(1, 2) - 0.5, lambda targets: targets
    )
    found = instance_of(subject).score(other, graph)
    same = all(np.array_equal(_flat(first[name]), _flat(found[name])) for name in first)
    require(not same, "two sets have the same scores")


def check_masks_keep_to_their_modes(subject: Subject) -> None:
    """Check that a mask has as many channels as its mode is charged for, and those of largest score."""
    probe, graph = _probe()
    scores = instance_of(subject).select(summarise(probe, graph))
    for axis in ("in", "out"):
        for ratio in (1 / 2, 1 / 4, 1 / 8):
            mode = Mode.channels(ratio, axis)
            modes = [mode if g.name in scores else Mode.FROZEN for g in graph.groups]
            for name, chosen in choose_channels(modes, graph, scores).items():
                worth = scores[name].inputs if axis == "in" else scores[name].outputs
                assert worth is not None
                count = mode.channel_count(len(worth))
                require(
                    len(set(chosen)) == count, f"{len(chosen)} channels of {name!r}, not {count}"
                )
                left = np.delete(worth, list(chosen))
                best = len(left) == 0 or worth[list(chosen)].min() >= left.max()
                require(best, f"channels of {name!r} that are worth more are left out")


def _probe() -> tuple[Probe, BackwardGraph]:
    training = made_up_training()
    probe = training.probe(1)
    with untouched(training.model):
        graph = trace_step(training.model, probe.loss_fn, training.batches[0]).graph
    return probe, graph


def _with_inputs(probe: Probe, change: Change, of_targets: Change) -> Probe:
    return replace(probe, batches=[(change(x), of_targets(y)) for x, y in probe.batches])


def _require_like(
    first: dict[str, ChannelScores], again: dict[str, ChannelScores], broken: str
) -> None:
    require(set(first) == set(again), broken)
    for name, scores in first.items():
        near = np.allclose(_flat(scores), _flat(again[name]), rtol=1e-3, atol=1e-9)
        require(near, f"{broken}: {name!r}")


def _flat(scores: ChannelScores) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    require(scores.inputs is not None and scores.outputs is not None, "a side has no scores")
    assert scores.inputs is not None and scores.outputs is not None
    return np.concatenate([scores.inputs, scores.outputs])
