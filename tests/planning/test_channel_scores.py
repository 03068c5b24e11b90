"""Channel scores against formulas written out by hand, and the channels chosen by them."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from small_models import TiedEmbedding
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

from fl_elastic.errors import PlanError, RegistryError, TrainingError
from fl_elastic.groups import Mode, tensor_groups
from fl_elastic.groups.graph import BackwardGraph
from fl_elastic.groups.trace import trace_step
from fl_elastic.groups.untouched import untouched
from fl_elastic.planning.importance import CHANNEL_SCORES, IMPORTANCES, ChannelScore, Probe
from fl_elastic.planning.importance.channel_scores import FisherChannels
from fl_elastic.planning.importance.channels import ChannelScores, choose_channels
from fl_elastic.testing import Check, channel_score_checks, name_of
from fl_elastic.testing.probes import made_up_training
from fl_elastic.testing.profiles import made_up_graph

NAMES = ["fisher", "l2"]


class TwoLayers(nn.Module):
    """A convolution with norm and activation module, a second with a functional one, and a head."""

    def __init__(self, *, inplace: bool = False) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.act = nn.ReLU(inplace=inplace)
        self.second = nn.Conv2d(4, 4, 3, padding=1, groups=2, bias=False)
        self.third = nn.Conv2d(4, 6, 1)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Use the activation module twice, the second time behind a sum."""
        y = self.act(self.norm(self.first(x)))
        z = self.second(y)
        z = self.act(z.add_(y) if self.act.inplace else z + y)
        out: Tensor = self.head(relu(self.third(z)).mean((2, 3)))
        return out


def trained_norm(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None and module.running_var is not None
            module.running_mean.normal_(generator=generator)
            module.running_var.uniform_(0.5, 2.0, generator=generator)
    return model


def probe_of(model: nn.Module, *batches: Any) -> tuple[Probe, BackwardGraph]:
    with untouched(model):
        graph = trace_step(model, cross_entropy, batches[0]).graph
    groups = tensor_groups(model, cross_entropy, batches[0])
    generator = np.random.default_rng(0)
    return Probe(model, cross_entropy, groups, batches, torch.optim.SGD, generator), graph


def pictures(count: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(count, 3, 5, 5, generator=generator),
        torch.randint(3, (count,), generator=generator),
    )


def two_layers(**options: bool) -> TwoLayers:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = TwoLayers(**options)
    trained_norm(model)
    return model


def by_hand(model: TwoLayers, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """The potential of each tensor of the model: example by example, written out."""
    sums: dict[str, Tensor] = {}
    for x, target in zip(*batch, strict=True):
        image = x[None].clone().requires_grad_(True)
        n = model.norm
        scale = (n.weight / (n.running_var + n.eps).sqrt())[:, None, None]  # type: ignore[operator]
        normed = (model.first(image) - n.running_mean[:, None, None]) * scale  # type: ignore[index]
        y = relu(normed + n.bias[:, None, None])
        second = model.second(y)
        z = relu(second + y)
        third = model.third(z)
        pooled = relu(third).mean((2, 3))
        logits = model.head(pooled)
        named = {"image": image, "y": y, "second": second, "z": z, "third": third,
                 "pooled": pooled, "logits": logits}  # fmt: skip
        loss = cross_entropy(logits, target[None])
        found = torch.autograd.grad(loss, list(named.values()))
        for (name, value), gradient in zip(named.items(), found, strict=True):
            product = (
                (value * gradient)[0].detach().flatten(1)
                if value.dim() == 4
                else (value * gradient).T
            )
            square = product.sum(1).square() / (2 * len(batch[0]))
            sums[name] = sums.get(name, torch.zeros_like(square)) + square.detach()
    return sums


def test_the_registered_channel_scores_are_all_checked() -> None:
    assert CHANNEL_SCORES.names() == NAMES
    assert len({name_of(check) for check in channel_score_checks()}) == 5
    with pytest.raises(RegistryError, match="did you mean 'fisher'"):
        CHANNEL_SCORES.make("fischer")


@pytest.mark.parametrize("check", channel_score_checks(), ids=name_of)
@pytest.mark.parametrize("name", NAMES)
def test_channel_score_conforms(name: str, check: Check) -> None:
    score = CHANNEL_SCORES.make(name)
    check(score)
    check(type(score))


@pytest.mark.parametrize("inplace", [False, True])
def test_fisher_is_the_formula_after_norm_and_activation(inplace: bool) -> None:
    model, batch = two_layers(inplace=inplace), pictures()
    expected = by_hand(two_layers(), batch)
    found = CHANNEL_SCORES.make("fisher").score(*probe_of(model, batch))
    # The second layer's output is used by a sum, the third's by an activation that is no module.
    taps = {"first": ("image", "y"), "second": ("y", "second"), "third": ("z", "third"),
            "head": ("pooled", "logits")}  # fmt: skip
    assert set(found) == set(taps)
    for name, (entering, leaving) in taps.items():
        scores = found[name]
        assert scores.inputs == pytest.approx(expected[entering].numpy(), rel=1e-4, abs=1e-12)
        assert scores.outputs == pytest.approx(expected[leaving].numpy(), rel=1e-4, abs=1e-12)


def test_an_output_with_two_users_is_tapped_before_its_activation() -> None:
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2, bias=False)
            self.act = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            doubled = 2 * y
            out: Tensor = doubled + self.act(y)
            return out

    model = Fork()
    with torch.no_grad():
        model.layer.weight.copy_(torch.diag(torch.tensor([3.0, -1.0])))
    batch = torch.ones(1, 2), torch.zeros(1)
    with untouched(model):
        graph = trace_step(model, lambda out, _: out.sum(), batch).graph
    probe = Probe(model, lambda out, _: out.sum(), graph.groups, [batch], torch.optim.SGD,
                  np.random.default_rng(0))  # fmt: skip
    # Activation times gradient: 3 x (2 + 1) and -1 x 2.
    assert FisherChannels().score(probe, graph)["layer"].outputs == pytest.approx([81 / 2, 4 / 2])


def test_fisher_of_a_two_layer_toy_in_numbers() -> None:
    model = nn.Sequential(nn.Linear(1, 2, bias=False), nn.ReLU(), nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        model.get_parameter("0.weight").copy_(torch.tensor([[1.0], [-1.0]]))
        model.get_parameter("2.weight").copy_(torch.tensor([[3.0, 5.0]]))
    batch = torch.tensor([[2.0], [1.0], [-1.0]]), torch.zeros(3, 1)
    with untouched(model):
        graph = trace_step(model, lambda out, _: out.mean(), batch).graph
    probe = Probe(model, lambda out, _: out.mean(), graph.groups, [batch], torch.optim.SGD,
                  np.random.default_rng(0))  # fmt: skip
    found = FisherChannels().score(probe, graph)
    # Hidden activations are (2, 0), (1, 0), (0, 1), their gradients (3, 5) where they are not zero.
    hidden = [(6**2 + 3**2) / 6, 5**2 / 6]
    assert found["0"].outputs == pytest.approx(hidden)
    assert found["2"].inputs == pytest.approx(hidden)
    assert found["2"].outputs == pytest.approx([(6**2 + 3**2 + 5**2) / 6])
    # The product of input and its gradient is the same sum of paths.
    assert found["0"].inputs == pytest.approx([(6**2 + 3**2 + 5**2) / 6])


def test_several_batches_are_the_same_sum() -> None:
    x, y = pictures(6)
    whole = probe_of(two_layers(), (x, y))
    parts = probe_of(two_layers(), (x[:4], y[:4]), (x[4:], y[4:]))
    found = FisherChannels().score(*parts)
    for name, scores in FisherChannels().score(*whole).items():
        assert found[name].outputs == pytest.approx(scores.outputs, rel=1e-4, abs=1e-10)
        assert found[name].inputs == pytest.approx(scores.inputs, rel=1e-4, abs=1e-10)


def test_an_input_channel_of_a_grouped_layer_counts_the_weights_that_read_it() -> None:
    model = two_layers()
    found = CHANNEL_SCORES.make("l2").score(*probe_of(model, pictures()))["second"]
    weight = model.second.weight.detach()
    # Channel 3 is the second of the second group, which puts out channels 2 and 3.
    assert found.inputs is not None and found.outputs is not None
    assert found.inputs[3] == pytest.approx(weight[2:, 1].norm().item(), rel=1e-6)
    assert found.outputs[3] == pytest.approx(weight[3].norm().item(), rel=1e-6)
    assert found.inputs.shape == found.outputs.shape == (4,)


def test_a_layer_that_is_used_twice_adds_up_its_uses() -> None:
    shared = nn.Linear(3, 3, bias=False)
    model = nn.Sequential(shared, shared)
    with torch.no_grad():
        shared.weight.copy_(torch.diag(torch.tensor([2.0, 1.0, 0.5])))
    batch = torch.ones(1, 3), torch.zeros(1)
    with untouched(model):
        graph = trace_step(model, lambda out, _: out.sum(), batch).graph
    probe = Probe(model, lambda out, _: out.sum(), graph.groups, [batch], torch.optim.SGD,
                  np.random.default_rng(0))  # fmt: skip
    (scores,) = FisherChannels().score(probe, graph).values()
    # Each use of channel 0 has activation times gradient 4: (4 + 4)^2 / 2.
    assert scores.outputs == pytest.approx([32.0, 2.0, (0.25 + 0.25) ** 2 / 2])


def test_group_importance_is_the_sum_over_output_channels() -> None:
    model, batch = two_layers(), pictures()
    probe, graph = probe_of(model, batch)
    scores = CHANNEL_SCORES.make("fisher").score(probe, graph)
    found = IMPORTANCES.make("fisher").score(probe)
    for group, worth in zip(probe.groups, found, strict=True):
        outputs = scores[group.name].outputs if group.name in scores else np.zeros(1)
        assert outputs is not None and worth == pytest.approx(outputs.sum())
    assert found[[g.name for g in probe.groups].index("norm")] == 0


def test_norm_statistics_of_the_batch_have_no_say() -> None:
    model, batch = two_layers(), pictures()
    training = FisherChannels().score(*probe_of(model.train(), batch))
    resting = FisherChannels().score(*probe_of(model.eval(), batch))
    assert training["first"].outputs == pytest.approx(resting["first"].outputs)


def test_channels_are_the_best_on_the_axis_of_the_mode() -> None:
    model = two_layers()
    _, graph = probe_of(model, pictures())
    names = [group.name for group in graph.groups]
    modes = [Mode.FROZEN] * len(names)
    modes[names.index("third")] = Mode.channels(1 / 2, "in")
    modes[names.index("first")] = Mode.channels(1 / 4, "out")
    modes[names.index("head")] = Mode.FULL
    scores = {
        "third": ChannelScores(np.array([1.0, 3.0, 3.0, 3.0]), np.zeros(6)),
        "first": ChannelScores(None, np.array([0.0, 0.0, -1.0, 0.5])),
    }
    assert choose_channels(modes, graph, scores) == {"third": (1, 2), "first": (3,)}


def test_a_depthwise_layer_is_chosen_by_what_it_puts_out() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, groups=4), nn.Flatten(), nn.Linear(36, 3)
    )
    _, graph = probe_of(model, pictures())
    modes = [Mode.channels(1 / 2) if g.name == "1" else Mode.FROZEN for g in graph.groups]
    scores = {"1": ChannelScores(np.array([9.0, 9.0, 0, 0]), np.array([0, 0, 9.0, 9.0]))}
    assert choose_channels(modes, graph, scores) == {"1": (2, 3)}


def test_a_group_without_scores_is_named() -> None:
    _, graph = probe_of(two_layers(), pictures())
    modes = [Mode.channels(1 / 2) if g.name == "norm" else Mode.FROZEN for g in graph.groups]
    with pytest.raises(PlanError, match=r"'norm'.*in/2"):
        choose_channels(modes, graph, {})


def test_examples_of_no_common_number_are_passed_whole() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor, weights: Tensor) -> Tensor:
            out: Tensor = self.layer(x * weights)
            return out

    batch = (torch.randn(6, 4), torch.rand(4)), torch.zeros(6, dtype=torch.long)
    found = FisherChannels().score(*probe_of(Masked(), batch))
    outputs = found["layer"].outputs
    assert outputs is not None and (outputs > 0).all()


def test_impossible_probes_are_named() -> None:
    probe, graph = probe_of(two_layers(), pictures())
    broken = Probe(probe.model, cross_entropy, probe.groups,
                   [(torch.full((2, 3, 5, 5), float("nan")), torch.zeros(2, dtype=torch.long))],
                   torch.optim.SGD, probe.generator)  # fmt: skip
    with pytest.raises(TrainingError, match="probe batch is nan"):
        FisherChannels().score(broken, graph)


def test_only_one_example_is_in_memory_at_a_time() -> None:
    training = made_up_training()
    probe = training.probe(1)
    seen = []
    handle = training.model.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    with untouched(training.model):
        graph = trace_step(training.model, probe.loss_fn, probe.batches[0]).graph
    seen.clear()
    FisherChannels().score(probe, graph)
    handle.remove()
    assert seen == [1] * 8


def test_a_head_that_shares_its_weight_with_the_embedding_is_scored_by_what_it_puts_out() -> None:
    torch.manual_seed(0)
    model, batch = TiedEmbedding(), (torch.randint(11, (4, 5)), torch.randint(11, (4,)))
    graph = trace_step(model, cross_entropy, batch).graph
    probe, _ = probe_of(model, batch)
    found = FisherChannels().score(probe, graph)["embedding"].outputs
    assert found is not None
    outputs = model(batch[0])
    (gradient,) = torch.autograd.grad(cross_entropy(outputs, batch[1], reduction="sum"), outputs)
    expected = (outputs * gradient).detach().square().sum(0) / (2 * len(outputs))
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5)


class Settled(ChannelScore):
    """A score of one's own, whose settings are arrays or numbers."""

    batches_needed = 0
    taken: ClassVar[list[Any]] = []

    def __init__(self, setting: Any) -> None:
        self.setting = setting

    def score(self, probe: Probe, graph: BackwardGraph) -> dict[str, ChannelScores]:
        """Note who was asked."""
        self.taken.append(self)
        return {}


@pytest.mark.parametrize(
    ("setting", "other", "passes"),
    [
        (1.0, 1.0, 1),
        (1.0, 2.0, 2),
        # Arrays are not compared: what may differ is taken anew.
        (np.ones(2), np.ones(2), 2),
        (torch.ones(2), torch.ones(2), 2),
    ],
)
def test_a_probe_is_scored_once_by_the_same_settings(setting: Any, other: Any, passes: int) -> None:
    Settled.taken.clear()
    probe, graph = made_up_training().probe(0), made_up_graph(3)
    for each in (setting, other):
        Settled(each).once(probe, graph)
    assert len(Settled.taken) == passes
