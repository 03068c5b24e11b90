"""FedEL: the window's way, exits, costs, and a round by hand."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from peer_tasks import RATE, assert_close, by_hand, known_costs, merged, plain_sgd, task_of, weights
from small_models import Inception, Residual, chain, conv_net, images, loss_fn, vectors
from torch import Tensor, nn

from fl_elastic.errors import ModelError, ProfileError
from fl_elastic.groups import TensorGroup
from fl_elastic.groups.graph import GroupKind
from fl_elastic.groups.trace import trace_step
from fl_elastic.groups.untouched import untouched
from fl_elastic.losses import classification_loss
from fl_elastic.named_models import build_model
from fl_elastic.planning.importance import IMPORTANCES, Probe
from fl_elastic.profiling import profile_model
from fl_elastic.testing.probes import Snapshot
from fl_elastic.update import Manifest
from fl_elastic_simulations.peers import PEERS
from fl_elastic_simulations.peers.early_exits import EarlyExits, ExitHead, block_ends, with_exits
from fl_elastic_simulations.peers.fedel import adjusted_importance
from fl_elastic_simulations.peers.windows import Window, WindowCosts, first_window, next_window


def test_the_window_moves_to_the_output_and_begins_anew() -> None:
    seconds, limit = [3.0, 1.0, 1.0, 2.0, 4.0, 1.0], 3.5
    window = first_window(seconds, limit)
    seen = [(window.end, window.front)]
    # Nothing is ever selected but in the block at the front.
    for _ in range(5):
        window = next_window(seconds, limit, window, [window.front])
        seen.append((window.end, window.front))
    # 3 + 1 reach 3.5; then 1 + 2 + 4, then the last; then all over again.
    assert seen == [(0, 1), (1, 4), (4, 5), (0, 1), (1, 4), (4, 5)]


def test_blocks_are_only_dropped_from_the_end() -> None:
    seconds = [1.0] * 8
    assert next_window(seconds, 2.0, Window(0, 3), selected=[1, 3]) == Window(1, 5)
    assert next_window(seconds, 2.0, Window(0, 3), selected=[0]) == Window(0, 5)
    assert next_window(seconds, 2.0, Window(0, 3), selected=[]) == Window(4, 5)
    assert next_window(seconds, 2.0, Window(3, 6), selected=[6]) == Window(6, 7)


@pytest.mark.parametrize(
    ("limit", "front"), [(0.5, 0), (1.0, 0), (1.5, 1), (3.0, 1), (3.1, 2), (99.0, 3), (math.inf, 3)]
)
def test_the_first_window_just_reaches_the_limit(limit: float, front: int) -> None:
    assert first_window([1.0, 2.0, 3.0, 4.0], limit) == Window(0, front)


def blocks_of(model: nn.Module, batch: Any) -> list[list[str]]:
    profile = profile_model(model, classification_loss, batch)
    costs = WindowCosts(profile, block_ends(profile.graph))
    return [[profile.group_names[g] for g in block][::-1] for block in costs.blocks]


def test_blocks_are_layers_of_a_chain_and_units_of_a_residual_network() -> None:
    assert blocks_of(chain(), vectors()[0]) == [["0"], ["2"], ["4"], ["6"]]
    assert blocks_of(conv_net(), images()[0]) == [["0", "1"], ["3", "4"], ["6", "7"], ["11"]]
    unit, head = blocks_of(Residual(), images()[0])
    assert sorted(unit) == ["first", "second", "short"] and head == ["head"]
    resnet = blocks_of(build_model("resnet8", (3, 16, 16), 3, 0), image_batch((3, 16, 16)))
    assert resnet[0] == ["conv1", "norm1"] and resnet[-1] == ["head"] and len(resnet) == 5
    assert all(name.startswith("block3.") for name in resnet[3])


def image_batch(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    return torch.randn(4, *shape), torch.tensor([0, 1, 2, 0])


@pytest.mark.parametrize(
    ("name", "shape"),
    [("digits_cnn", (1, 8, 8)), ("resnet8", (3, 16, 16)), ("har_cnn", (6, 64)),
     ("small_vit", (3, 32, 32))],
)  # fmt: skip
def test_exits_change_neither_names_nor_outputs_nor_groups(
    name: str, shape: tuple[int, ...]
) -> None:
    model, batch = build_model(name, shape, 3, 0), image_batch(shape)
    plain = deepcopy(model)
    with untouched(plain):
        graph = trace_step(plain, loss_fn, batch).graph
    before = Snapshot(model)
    exits = with_exits(model, loss_fn, batch)
    assert before.differences() == []
    names = Manifest.of(plain).names
    assert Manifest.of(exits).names[: len(names)] == names
    assert {n.split(".")[0] for n in Manifest.of(exits).names[len(names) :]} == {"early_exits"}
    exits.eval()
    assert torch.equal(exits(batch[0]), plain.eval()(batch[0]))
    exits.train()
    with untouched(exits):
        again = trace_step(exits, loss_fn, batch).graph
    assert again.groups == graph.groups and again.cuts == graph.cuts
    for block in range(len(exits.ends)):
        with exits.left_after(block):
            assert exits(batch[0]).shape == (4, 3)
    assert exits(batch[0]).shape == (4, 3)


def test_exits_are_the_same_on_every_side_and_survive_a_copy() -> None:
    batch = images()[0]
    torch.manual_seed(1)
    model = conv_net()
    one = with_exits(deepcopy(model), loss_fn, batch)
    torch.manual_seed(2)
    two = deepcopy(with_exits(deepcopy(model), loss_fn, batch))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    with torch.no_grad():
        two.get_parameter("0.weight").zero_()
        two.get_parameter("0.bias").zero_()
    assert not torch.equal(one.eval()(batch[0]), two.eval()(batch[0]))
    two.load_state_dict(one.state_dict())
    assert torch.equal(one.eval()(batch[0]), two.eval()(batch[0]))


class Tokens(nn.Module):
    """Tensors of its own, beside its layers, and a training flag that it looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.first = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x * self.scale))
        out: Tensor = self.head(x)
        return out * (2.0 if self.training else 1.0)


def test_a_models_own_tensors_and_flag_are_shared() -> None:
    batch = vectors()[0]
    model = with_exits(Tokens(), loss_fn, batch)
    whole = model(batch[0])
    assert torch.equal(whole, 2 * model.eval()(batch[0]))
    before = model(batch[0])
    with torch.no_grad():
        model.get_parameter("scale").mul_(3.0)
    assert not torch.equal(before, model(batch[0]))
    model = model.double()
    assert model(batch[0].double()).dtype == torch.float64


def test_models_without_exits_are_refused() -> None:
    with pytest.raises(ModelError, match="class scores"):
        with_exits(nn.Conv2d(3, 3, 3), lambda o, t: o.mean(), images()[0])
    with pytest.raises(ModelError, match="no exits"):
        with_exits(nn.Linear(6, 3), loss_fn, vectors()[0])
    taken = Tokens()
    taken.early_exits = nn.Linear(1, 1)
    with pytest.raises(ModelError, match="rename"):
        with_exits(taken, loss_fn, vectors()[0])
    with pytest.raises(ModelError, match="prepare"):
        PEERS.make("fedel").train(task_of(chain(), vectors()))
    prepared = with_exits(chain(), loss_fn, vectors()[0])
    with pytest.raises(ProfileError, match="ends of the model's blocks"):
        WindowCosts(known_costs(nn.Sequential(nn.Linear(6, 3)), vectors()[0]), prepared.ends)


# The chain's step: 2 s forward, of which a quarter up to each layer's activation; nodes of 1 s: three of the loss,
# then layer (1 s on, 1 s own gradient) and activation in turn; the first layer passes nothing on.
def chain_costs() -> WindowCosts:
    profile = known_costs(chain(), vectors()[0])
    return WindowCosts(profile, block_ends(profile.graph))


@pytest.mark.parametrize(
    ("window", "trained", "expected"),
    [
        # Forward 0.5; exit: 0.5 forward, 3 of the loss, 2 of the head; activation 1, own gradient 1.
        (Window(0, 0), [3], 0.5 + 5.5 + 1 + 1),
        # Forward 1; two activations, two gradients, one way through the second layer.
        (Window(0, 1), [2, 3], 1.0 + 5.5 + 2 + 2 + 1),
        (Window(0, 1), [2], 1.0 + 5.5 + 1 + 1),
        (Window(0, 1), [3], 1.0 + 5.5 + 2 + 1 + 1),
        (Window(0, 2), [1], 1.5 + 5.5 + 1 + 1),
        # At the output: the model's own step.
        (Window(1, 3), [0, 2], 2 + 3 + 1 + 1 + 2 + 1 + 1),
        (Window(0, 3), [0, 1, 2, 3], 15.0),
    ],
)
def test_a_windows_step_costs_what_runs_in_it(
    window: Window, trained: list[int], expected: float
) -> None:
    mask = np.zeros(4, dtype=bool)
    mask[trained] = True
    assert chain_costs().step_seconds(window, mask) == pytest.approx(expected)


def test_a_deeper_graph_makes_the_forward_pass_dearer() -> None:
    profile = replace(
        known_costs(chain(), vectors()[0]), forward_seconds=np.array([2.0, 2.1, 2.3, 2.6])
    )
    costs = WindowCosts(profile, block_ends(profile.graph))
    mask = np.array([False, False, True, True])
    # From the second block's end to the first layer: 0.5 more than from the loss to there.
    assert costs.step_seconds(Window(0, 1), mask) == pytest.approx(1.0 + 0.5 + 5.5 + 2 + 2 + 1)
    mask[-1] = False
    assert costs.step_seconds(Window(0, 1), mask) == pytest.approx(1.0 + 0.2 + 5.5 + 1 + 1)


def test_an_exit_averages_over_positions_or_tokens() -> None:
    for name, shape, widths in (
        ("har_cnn", (6, 64), [32, 48, 64, 64]),
        ("digits_cnn", (1, 8, 8), [24, 40, 48, 192]),
        ("small_vit", (3, 32, 32), [128] * 6),
    ):
        model = with_exits(build_model(name, shape, 3, 0), loss_fn, image_batch(shape))
        heads = [model.get_submodule(f"early_exits.{block}") for block in range(len(model.ends))]
        assert [head.linear.in_features for head in heads] == widths, name
    features = torch.randn(2, 5, 4)
    positions, tokens = ExitHead(5, 3, axis=1), ExitHead(4, 3, axis=2)
    torch.testing.assert_close(positions(features), positions.linear(features.mean(2)))
    torch.testing.assert_close(tokens(features), tokens.linear(features.mean(1)))


@pytest.mark.parametrize("window", [Window(0, 1), Window(0, 2), Window(1, 2), Window(1, 3)])
@pytest.mark.parametrize("limit", [0.0, 7.0, 9.5, 11.0, 12.0, 14.0, 99.0])
def test_selection_in_a_window_is_the_best_that_fits(window: Window, limit: float) -> None:
    costs = chain_costs()
    groups = list(costs.groups(window))
    worth = np.array([1.0, 2.5, 2.0, 0.7])[: len(groups)]
    best = 0.0
    for bits in range(1, 2 ** len(groups)):
        mask = np.zeros(4, dtype=bool)
        mask[[g for place, g in enumerate(groups) if bits >> place & 1]] = True
        if costs.step_seconds(window, mask) <= limit:
            best = max(best, float(worth[mask[groups]].sum()))
    found = costs.select(window, worth, limit)
    assert found.any() and not found[[g for g in range(4) if g not in groups]].any()
    if best:
        assert float(worth[found[groups]].sum()) == best
        assert costs.step_seconds(window, found) <= limit + 1e-9
    else:
        assert np.flatnonzero(found).tolist() == [groups[0]]


def run_rounds(rounds: int, allowed_step: float) -> list[tuple[list[int], list[str], float]]:
    """Windows, trained tensors and seconds of a slow client's rounds."""
    peer, batches = PEERS.make("fedel"), vectors(2)
    model = peer.prepare(chain(), loss_fn, batches[0])
    memory: dict[str, Any] = {}
    seen = []
    for number in range(1, rounds + 1):
        task = task_of(
            model, batches, profile=known_costs(chain(), batches[0]), memory=memory,
            allowed_seconds=2 * allowed_step, server_round=number,
        )  # fmt: skip
        result = peer.train(task)
        seen.append((memory["window"], sorted(result.update.deltas), result.host_seconds))
        # Two steps of any window take longer than the round may, and so does a probe.
        assert result.steps == 1 and result.choosing_seconds == 0.0
        assert result.host_seconds <= 2 * allowed_step
    return seen


def test_a_slow_client_goes_through_the_whole_model() -> None:
    seen = run_rounds(8, allowed_step=5.0)
    fronts = [window[1] for window, _, _ in seen]
    # Blocks of 3, 3, 3 and 4 s: two reach 5 s.
    assert fronts == [1, 3, 1, 3, 1, 3, 1, 3]
    trained = {name.split(".")[0] for _, names, _ in seen for name in names}
    # Too little even for one group beside exit and forward pass: the one at the front, in fewer steps.
    assert trained == {"2", "6", "early_exits"}
    assert all(
        ("early_exits.1.linear.bias" in names) == (window[1] == 1) for window, names, _ in seen
    )


def test_a_round_by_hand() -> None:
    peer, data = PEERS.make("fedel"), [vectors(2, seed=1), vectors(2, size=4, seed=2)]
    model = peer.prepare(chain(), loss_fn, data[0][0])
    profile = known_costs(chain(), data[0][0])
    # The slow client's first two blocks cost 6 s, their step 11.5 and a probe 23: it has 11.8 for one step.
    results = [
        peer.train(task_of(deepcopy(model), d, profile=profile, allowed_seconds=allowed,
                           memory={"window": [0, 3], "selected": [0]} if slow else {}))
        for d, allowed, slow in ((data[0], math.inf, False), (data[1], 2 * 5.9, True))
    ]  # fmt: skip
    layers = [f"{layer}.{kind}" for layer in (0, 2, 4, 6) for kind in ("weight", "bias")]
    one = by_hand(chain_of(model), data[0], layers, 2)
    trained = [name for name in results[1].update.deltas if not name.startswith("early")]
    assert trained == ["2.weight", "2.bias"]
    assert results[1].steps == 1 and results[1].host_seconds <= 2 * 5.9
    two = exit_round_by_hand(model, data[1][:1])
    expected = {name: one[name] for name in layers} | {
        name: (one[name] + two[name]) / 2 for name in trained
    } | {name: two[name] for name in two if name.startswith("early")}  # fmt: skip
    after = merged(peer, model, results)
    assert_close(after, expected)
    assert np.array_equal(
        after["early_exits.0.linear.weight"], weights(model)["early_exits.0.linear.weight"]
    )


def chain_of(model: nn.Module) -> nn.Sequential:
    plain = chain()
    plain.load_state_dict({n: t for n, t in model.state_dict().items() if "early" not in n})
    return plain


def exit_round_by_hand(model: nn.Module, batches: list[Any]) -> dict[str, Tensor]:
    """Steps of two blocks, of which the second is trained, and the linear exit behind its activation."""
    names = ["2.weight", "2.bias", "early_exits.1.linear.weight", "early_exits.1.linear.bias"]
    tensors = [model.get_parameter(name).detach().clone() for name in names]
    w0, b0 = model.get_parameter("0.weight").detach(), model.get_parameter("0.bias").detach()
    for inputs, targets in batches:
        for tensor in tensors:
            tensor.requires_grad_(True)
        w1, b1, w, b = tensors
        hidden = torch.relu(torch.relu(inputs @ w0.T + b0) @ w1.T + b1)
        loss = nn.functional.cross_entropy(hidden @ w.T + b, targets)
        gradients = torch.autograd.grad(loss, tensors)
        with torch.no_grad():
            for tensor, gradient in zip(tensors, gradients, strict=True):
                tensor -= RATE * gradient
    return {name: tensor.detach() for name, tensor in zip(names, tensors, strict=True)}


def test_nothing_runs_behind_the_front() -> None:
    peer, batches = PEERS.make("fedel"), images(2)
    model = peer.prepare(conv_net(), loss_fn, batches[0])
    ran: list[str] = []
    for name, module in model.named_modules():
        if name:
            module.register_forward_hook(lambda *_, name=name: ran.append(name))
    profile = known_costs(conv_net(), batches[0])
    costs = WindowCosts(profile, block_ends(profile.graph))
    task = task_of(model, batches, profile=profile, allowed_seconds=2 * costs.block_seconds[0])
    result = peer.train(task)
    assert task.memory["window"] == [0, 0]
    assert not {"3", "4", "6", "7", "11"} & set(ran) and {"0", "early_exits.0"} <= set(ran)
    before = weights(peer.prepare(conv_net(), loss_fn, batches[0]))
    assert {name.split(".")[0] for name in result.update.deltas} <= {"0", "1", "early_exits"}
    assert set(before) >= set(result.update.deltas)


def test_notes_of_another_model_begin_anew() -> None:
    peer, batches = PEERS.make("fedel"), vectors(2)
    model = peer.prepare(chain(), loss_fn, batches[0])
    memory: dict[str, Any] = {"window": [5, 9], "selected": [7]}
    peer.train(task_of(model, batches, memory=memory, allowed_seconds=2 * 5.0))
    assert memory["window"] == [0, 1]


def test_what_is_trained_is_the_best_by_own_and_global_importance() -> None:
    peer, batches = PEERS.make("fedel"), vectors(20)
    model = peer.prepare(chain(), loss_fn, batches[0])
    profile = known_costs(chain(), batches[0])
    groups = profile.graph.groups
    # The probe passes twice over a batch with the whole window, which here is the whole model.
    probing, step_limit = 2 * 15.0, 13.0
    probe = Probe(
        deepcopy(model), loss_fn, groups, [batches[0]], plain_sgd, np.random.default_rng(0)
    )
    own = IMPORTANCES.make("elastic_same_batch").score(probe)
    seen = set()
    for layer in ("6", "4", "2", "0"):
        change = {f"{layer}.weight": 8.0, "6.bias": 0.5}
        task = task_of(
            deepcopy(model), batches, profile=profile, allowed_seconds=probing + 20 * step_limit,
            memory={"window": [0, 1], "selected": [0]}, global_change=change,
        )  # fmt: skip
        result = peer.train(task)
        assert task.memory["window"] == [0, 3]
        worth = adjusted_importance(own, groups, change)
        masks = [np.array(bits) for bits in product([False, True], repeat=4)]
        fitting = [
            mask for mask in masks if mask.any() and profile.step_seconds(mask) <= step_limit
        ]
        best = max(fitting, key=lambda mask: float(worth[mask].sum()))
        trained = {name.split(".")[0] for name in result.update.deltas}
        assert trained == {name for name, on in zip(profile.group_names, best, strict=True) if on}
        assert result.steps == 20 and result.choosing_seconds == probing
        assert result.host_seconds == pytest.approx(probing + 20 * profile.step_seconds(best))
        free = PEERS.make("fedel_free_probe").train(
            replace(task, model=deepcopy(model), memory={"window": [0, 1], "selected": [0]},
                    allowed_seconds=20 * step_limit)
        )  # fmt: skip
        assert free.choosing_seconds == 0.0 and set(free.update.deltas) == set(result.update.deltas)
        seen.add(frozenset(trained))
    assert len(seen) > 1


def test_importance_is_mixed_after_scaling() -> None:
    groups = [TensorGroup(n, (f"{n}.w", f"{n}.b"), ((2,), (2,)), GroupKind.OTHER) for n in "abc"]
    own = np.array([2.0, -1.0, 0.5])
    assert adjusted_importance(own, groups, {}).tolist() == [1.0, -0.5, 0.25]
    mixed = adjusted_importance(own, groups, {"b.w": 1.0, "b.b": 3.0, "c.w": 1.0, "z": 9.0})
    assert mixed == pytest.approx([0.6, -0.3 + 0.4, 0.15 + 0.1])
    assert adjusted_importance(np.zeros(3), groups, {"a.w": 2.0}).tolist() == [0.4, 0.0, 0.0]


def test_branches_stay_in_one_block() -> None:
    model, batches = Inception(), images(2)
    prepared = PEERS.make("fedel").prepare(model, loss_fn, batches[0])
    assert isinstance(prepared, EarlyExits)
    profile = known_costs(Inception(), batches[0])
    costs = WindowCosts(profile, prepared.ends)
    assert sorted(g for block in costs.blocks for g in block) == list(range(len(profile)))
