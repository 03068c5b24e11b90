"""Learned selectors: the summary of a set by hand, the network and its file, and what a fit makes of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from selector_checks import selector_checks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_elastic import Budget, ElasticTrainer
from fl_elastic.errors import TrainingError
from fl_elastic.groups import Mode, tensor_groups
from fl_elastic.groups.graph import BackwardGraph
from fl_elastic.groups.trace import trace_step
from fl_elastic.groups.untouched import untouched
from fl_elastic.methods.learned_selector.importance import (
    LearnedChannels,
    LearnedImportance,
    SelectorNetwork,
)
from fl_elastic.methods.learned_selector.set_summary import (
    FEATURES,
    LayerSummary,
    SummaryScore,
    summarise,
)
from fl_elastic.planning import POLICIES
from fl_elastic.planning.importance import ChannelScore, Probe
from fl_elastic.planning.importance.channel_scores import FisherChannels, WeightNormChannels
from fl_elastic.planning.importance.channels import ChannelScores
from fl_elastic.profiling.macs import backward_macs
from fl_elastic.testing import Check, channel_score_checks, name_of


def net(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5),
            nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.ReLU(), nn.Conv2d(8, 16, 1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4),
        )  # fmt: skip


def batch(count: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, 6, 6, generator=generator), torch.arange(count) % 4


def probe_of(model: nn.Module, *batches: tuple[Tensor, Tensor]) -> tuple[Probe, BackwardGraph]:
    with untouched(model):
        graph = trace_step(model, cross_entropy, batches[0]).graph
    groups = tensor_groups(model, cross_entropy, batches[0])
    generator = np.random.default_rng(0)
    return Probe(model, cross_entropy, groups, batches, torch.optim.SGD, generator), graph


def network(seed: int = 0, *, hidden: int = 7) -> SelectorNetwork:
    drawn = np.random.default_rng(seed)
    count = len(FEATURES)
    return SelectorNetwork(
        drawn.normal(size=count), drawn.uniform(0.5, 2, count),
        [drawn.normal(size=(hidden, count)), drawn.normal(size=(1, hidden))],
        [drawn.normal(size=hidden), drawn.normal(size=1)],
    )  # fmt: skip


class Small(LearnedChannels):
    """A selector with a file of its own."""


@pytest.mark.parametrize("check", selector_checks(), ids=name_of)
def test_the_learned_selector_conforms(check: Check) -> None:
    check(LearnedChannels)
    check(LearnedChannels())


class Blind(SummaryScore):
    """Gives the same scores whatever the set is."""

    def select(self, summary: dict[str, LayerSummary]) -> dict[str, ChannelScores]:  # type: ignore[override]
        return {
            n: ChannelScores(np.arange(float(len(s.inputs))), np.arange(float(len(s.outputs))))
            for n, s in summary.items()
        }


class Peeking(Blind):
    """Looks at the first example beside the summary."""

    def score(self, probe: Probe, graph: BackwardGraph) -> dict[str, ChannelScores]:
        first = float(probe.batches[0][0][0].sum())
        found = self.select(summarise(probe, graph))
        return {n: ChannelScores(s.inputs * first, s.outputs) for n, s in found.items()}  # type: ignore[operator]


class Backward(FisherChannels, SummaryScore):
    """Takes the backward pass that it was to spare."""

    select = Blind.select


@pytest.mark.parametrize(
    ("kind", "broken"),
    [
        (Blind, "check_scores_depend_on_the_set"),
        (Peeking, "check_order_of_examples_does_not_matter"),
        (Backward, "check_it_takes_no_backward_pass"),
    ],
)
def test_the_checks_can_fail(kind: type[SummaryScore], broken: str) -> None:
    checks = {name_of(check): check for check in selector_checks()}
    assert set(checks) > {name_of(check) for check in channel_score_checks()}
    with pytest.raises(AssertionError):
        checks[broken](kind)


def test_a_summary_is_what_is_said_of_it() -> None:
    model, (x, y) = net(), batch()
    model(batch(seed=3)[0])
    probe, graph = probe_of(model, (x, y))
    found = summarise(probe, graph)
    assert set(found) == {"0", "4", "6", "10"}
    with torch.no_grad():
        first = model.eval()[2](model[1](model[0](x)))
        second = model[5](model[4](first))
    for name, side, value, weight in (
        ("0", "outputs", first, model[0].weight.flatten(1)),
        ("4", "outputs", second, model[4].weight.flatten(1)),
        ("6", "inputs", second, model[6].weight.transpose(0, 1).flatten(1)),
    ):
        rows = dict(zip(FEATURES, getattr(found[name], side).T, strict=True))
        mean = value.mean((2, 3)).double()
        for column, expected in (
            ("mean", mean.mean(0).abs()),
            ("spread", mean.std(0, correction=0)),
            ("energy", value.double().square().mean((0, 2, 3)).sqrt()),
            ("weight", weight.detach().double().norm(dim=1)),
        ):
            logs = (expected + 1e-8).log10().numpy()
            assert rows[column] == pytest.approx(logs - logs.mean(), abs=1e-5), column
            if f"layer_{column}" in rows:
                assert rows[f"layer_{column}"] == pytest.approx(
                    np.full(len(logs), logs.mean()), abs=1e-5
                )
        classes = torch.stack([mean[y == c].mean(0) for c in range(4)])
        share = classes.var(0, correction=0) / mean.var(0, correction=0)
        assert rows["between"] == pytest.approx(share.clamp(0, 1).numpy(), abs=1e-4)
        assert set(rows["positions"]) == {np.log10(36)} and set(rows["outputs"]) == {
            float(side == "outputs")
        }
        assert set(rows["depthwise"]) == {float(name == "4")}
    assert found["10"].outputs[0, FEATURES.index("depth")] == 0
    assert found["0"].outputs[0, FEATURES.index("depth")] == 1


def test_a_summary_takes_the_first_examples_alone_and_several_inputs_to_a_target() -> None:
    model, (x, y) = net(), batch(24)
    found, graph = [], None
    for given in ((x, y), (torch.cat([x[:16], 9 * x[16:]]), y)):
        probe, graph = probe_of(model, given)
        found.append(summarise(probe, graph)["0"].outputs)
    assert np.array_equal(*found)
    twice = torch.cat([x[:8], x[:8] + 0.1])
    probe = Probe(
        model, cross_entropy, probe.groups, [(twice, y[:8])], torch.optim.SGD, probe.generator
    )
    assert graph is not None
    between = summarise(probe, graph)["0"].outputs[:, FEATURES.index("between")]
    assert (between > 0).all() and (between <= 1).all()


def test_the_network_is_a_perceptron_and_comes_back_from_its_file(tmp_path: Path) -> None:
    own, rows = network(), np.random.default_rng(1).normal(size=(9, len(FEATURES)))
    x = torch.from_numpy((rows - own.centre) / own.scale).clamp(-5, 5)
    hidden = torch.relu(x @ torch.from_numpy(own.weights[0]).T + torch.from_numpy(own.biases[0]))
    expected = (hidden @ torch.from_numpy(own.weights[1]).T)[:, 0] + own.biases[1][0]
    assert own(rows) == pytest.approx(expected.numpy())
    own.save(tmp_path / "s.fle", {"set": "made up"})
    assert np.array_equal(SelectorNetwork.load(tmp_path / "s.fle")(rows), own(rows))


def test_a_class_with_a_path_is_a_selector_of_ones_own(tmp_path: Path) -> None:
    network(3).save(tmp_path / "own.fle")
    Small.path = tmp_path / "own.fle"
    probe, graph = probe_of(net(), batch())
    found, shipped = Small().score(probe, graph), LearnedChannels().score(probe, graph)
    expected = 10 ** network(3)(summarise(probe, graph)["4"].outputs).clip(-30, 30)
    assert found["4"].outputs == pytest.approx(expected)
    assert not np.allclose(found["4"].outputs, shipped["4"].outputs)  # type: ignore[arg-type]


def test_files_that_are_no_selector_are_one_line(tmp_path: Path) -> None:
    path, good = tmp_path / "s.fle", network()
    bad = [
        SelectorNetwork(good.centre[:3], good.scale, good.weights, good.biases),
        SelectorNetwork(good.centre, 0 * good.scale, good.weights, good.biases),
        SelectorNetwork(good.centre, good.scale, good.weights[:1], good.biases[:1]),
        SelectorNetwork(
            good.centre, good.scale, good.weights, [np.full(7, np.nan), good.biases[1]]
        ),
        SelectorNetwork(good.centre, good.scale, [], []),
    ]
    for each in bad:
        each.save(path)
        with pytest.raises(TrainingError, match="is not used"):
            SelectorNetwork.load(path)
    good.save(path)
    path.write_bytes(path.read_bytes()[:-1])
    for where in (path, tmp_path / "nowhere.fle"):
        with pytest.raises(TrainingError, match="train or fetch it again") as caught:
            SelectorNetwork.load(where)
        assert "\n" not in str(caught.value)


def test_layers_are_worth_the_sum_of_their_outputs() -> None:
    probe, graph = probe_of(net(), batch())
    channels = LearnedChannels().score(probe, graph)
    found = LearnedImportance().score(probe)
    for group, worth in zip(probe.groups, found, strict=True):
        scores = channels.get(group.name)
        expected = 0.0 if scores is None or scores.outputs is None else scores.outputs.sum()
        assert worth == pytest.approx(expected, rel=1e-5)


def test_a_fit_by_it_keeps_to_the_budget_and_to_its_channels() -> None:
    model, data = net(), [batch(seed=seed) for seed in range(8)]
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    trainer = ElasticTrainer(
        model.train(), cross_entropy, lambda p: torch.optim.SGD(p, lr=0.05),
        budget=Budget(), policy="tinytrain_learned",
    )  # fmt: skip
    plan = trainer.fit(data).plan
    _, graph = probe_of(net(), data[0])
    full = backward_macs(graph, [Mode.FULL for _ in plan.modes])
    assert backward_macs(graph, plan.modes) <= 0.15 * full
    assert plan.mask.sum() > 1 and plan.channels
    for group, mode in zip(plan.groups, plan.modes, strict=True):
        weight, old = model.get_parameter(group.parameters[0]), before[group.parameters[0]]
        if mode.is_frozen:
            assert torch.equal(weight, old)
        elif group.name in plan.channels:
            moved = (weight != old).flatten(1).any(1).nonzero()[:, 0].tolist()
            assert moved and set(moved) <= set(plan.channels[group.name])


def test_the_policy_asks_for_no_other_score() -> None:
    policy = POLICIES.make("tinytrain_learned")
    assert (policy.needs.own_importance, policy.needs.channel_score) == ("learned", "learned")
    assert isinstance(LearnedChannels(), ChannelScore) and not isinstance(
        WeightNormChannels(), SummaryScore
    )
