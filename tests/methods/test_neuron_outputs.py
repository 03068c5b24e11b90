"""How much neurons changed, against a loop of cosines; what is kept for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from fl_elastic.errors import PlanError, TrainingError
from fl_elastic.methods.neurons.outputs import change_of, kept_inputs, neuron_outputs, with_kept
from fl_elastic.methods.neurons.policy import NeqPolicy
from fl_elastic.methods.neurons.scotti import ScottiPolicy
from fl_elastic.methods.neurons.velocity_policy import VelocityPolicy
from fl_elastic.planning import POLICIES
from fl_elastic.planning.request import MOST_BYTES, PolicyMemory


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 4, 3, stride=2),
        nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(4 * 4 * 4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2),
    ).eval()  # fmt: skip


LAYERS = ("0", "1", "3", "4", "6", "7")


def nearby(model: nn.Module, seed: int = 9) -> nn.Sequential:
    other = net(0)
    other.load_state_dict(model.state_dict())
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return other


@torch.no_grad()
def by_hand(one: nn.Sequential, other: nn.Sequential, x: Tensor) -> list[float]:
    changes, left, right = [], x, x
    for name, (a, b) in enumerate(zip(one, other, strict=True)):
        left, right = a(left), b(right)
        if str(name) not in LAYERS:
            continue
        for channel in range(left.shape[1]):
            mine, theirs = (each[:, channel].reshape(len(x), -1) for each in (left, right))
            if mine.shape[1] == 1:
                mine, theirs = mine.T, theirs.T
            each = [
                float(1 - cosine_similarity(m, t, dim=0)) for m, t in zip(mine, theirs, strict=True)
            ]
            changes.append(sum(each) / len(each))
    return changes


def test_changes_are_one_minus_the_mean_cosine_of_each_example() -> None:
    model, x = net(0), torch.randn(7, 3, 11, 11)
    other = nearby(model)
    before, now = (neuron_outputs(each, LAYERS, x, 100) for each in (model, other))
    assert {name: array.shape for name, array in now.items()} == {
        "0": (7, 5, 81), "1": (7, 5, 81), "3": (7, 4, 16), "4": (7, 4, 16), "6": (1, 6, 7), "7": (1, 6, 7),
    }  # fmt: skip
    assert all(array.dtype == np.float16 for array in now.values())
    expected = by_hand(model, other, x)
    assert change_of(before, now) == pytest.approx(expected, rel=5e-3, abs=2e-5)
    assert max(expected) > 1e-3


def test_a_sketch_keeps_changes_but_for_its_error() -> None:
    model, x = net(0), torch.randn(16, 3, 27, 27)
    model = nn.Sequential(*list(model)[:5])
    other = nn.Sequential(*list(nearby(net(0)))[:5])
    exact, rough = (
        change_of(*(neuron_outputs(each, LAYERS[:4], x, width) for each in (model, other)))
        for width in (1000, 64)
    )
    assert np.corrcoef(exact, rough)[0, 1] > 0.98
    assert np.abs(rough / exact - 1).max() < 4 * np.sqrt(2 / 64)
    sketch = neuron_outputs(model, LAYERS[:4], x, 64)["0"]
    assert sketch.shape == (16, 5, 64)


def test_zeros_are_alike_and_at_right_angles_to_all_else() -> None:
    off = np.zeros((2, 3, 4), np.float16)
    on = off.copy()
    on[:, 1:, 0] = 1.0
    on[:, 2, 0] = np.nan
    assert change_of({"a": off}, {"a": on}).tolist() == [0.0, 1.0, 1.0]
    assert change_of({"a": on}, {"a": on}).tolist() == [0.0, 0.0, 1.0]


def test_looking_leaves_the_model_as_it_was() -> None:
    model = net(0).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    neuron_outputs(model, LAYERS, torch.randn(2, 3, 11, 11), 8)
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    assert all(m.training and not m._forward_hooks for m in model.modules())
    with pytest.raises(TrainingError):
        neuron_outputs(model, LAYERS, torch.randn(2, 4, 11, 11), 8)
    assert all(m.training and not m._forward_hooks for m in model.modules())


def test_a_layer_that_runs_twice_is_left_out() -> None:
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(3, 2))
    assert set(neuron_outputs(model, ["0", "3"], torch.randn(2, 3), 8)) == {"3"}


@pytest.mark.parametrize(
    "batch",
    [
        (torch.randn(8, 3), torch.zeros(8)),
        ({"ids": torch.ones(8, 5, dtype=torch.int64), "mask": torch.ones(8, 5)}, torch.zeros(8)),
        ((torch.randn(8, 3), torch.randn(8, 2)), torch.zeros(8)),
        ([torch.randn(3, 4, 4), torch.randn(3, 5, 5), torch.randn(3, 4, 4)], [{}, {}, {}]),
        (torch.randn(8, 3, dtype=torch.bfloat16), torch.zeros(8)),
    ],
    ids=["tensor", "dict", "tuple", "list of examples", "bfloat16"],
)
def test_inputs_come_back_as_they_were(batch: Any) -> None:
    kept = kept_inputs(batch, 2, 10**6)
    again = with_kept(batch, kept)
    flat, other = (list(_tensors(each)) for each in (batch[0], again))
    for one, two in zip(flat, other, strict=False):
        assert two.dtype == one.dtype
        listed = isinstance(batch[1], list)
        assert torch.equal(two, one if listed else one[:2])
    assert with_kept((torch.ones(2, 1, 1, 1, 1), torch.ones(2)), kept) is None


def _tensors(value: Any) -> Any:
    if isinstance(value, Tensor):
        yield value
    else:
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


def test_a_memory_is_bounded() -> None:
    with pytest.raises(PlanError, match="keep less"):
        PolicyMemory("mine", {}, {"a": np.zeros(MOST_BYTES + 1, np.uint8)})
    with pytest.raises(PlanError, match="has type"):
        PolicyMemory("mine", {}, {"a": np.array(["text"])})


@pytest.mark.parametrize(
    "made",
    [
        lambda: NeqPolicy(eps=-1.0), lambda: NeqPolicy(mu=0.6),
        lambda: NeqPolicy(examples=0), lambda: VelocityPolicy(share=0.0), lambda: VelocityPolicy(share=1.1),
        lambda: ScottiPolicy(eps_momentum=1.0), lambda: ScottiPolicy(eps=-0.1),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused(made: Any) -> None:
    with pytest.raises(PlanError, match=r"must|unknown"):
        made()
    assert POLICIES.make("neq").name == "neq"  # type: ignore[attr-defined]
