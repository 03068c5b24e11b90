"""The first cost profile: what the optimiser costs, and how training corrects it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import chain, loss_fn, vectors
from torch import nn

from fl_elastic.profiling import estimate
from fl_elastic.profiling.estimate import estimate_profile
from fl_elastic.profiling.node_timer import sums_by_node
from fl_elastic.testing import made_up_profile
from fl_elastic.training.costs import refined

STATE = {"sgd": 0.0, "momentum": 4.0, "adam": 8.0, "refuses": 8.0}


def made(name: str, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    if name == "refuses" and len(parameters) == 1:
        raise ValueError("the model's own parameters, please")
    if name in ("adam", "refuses"):
        return torch.optim.Adam(parameters)
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9 * (name == "momentum"))


@pytest.mark.parametrize("name", STATE)
@pytest.mark.parametrize("memory", [None, 1e9])
def test_an_optimiser_is_tried_out_on_a_weight_of_its_own(name: str, memory: float | None) -> None:
    model = chain()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    profile = estimate_profile(
        model, loss_fn, vectors(1)[0], optimizer_fn=lambda p: made(name, [*p]), memory=memory
    )
    assert profile.optimizer_bytes_per_weight == STATE[name]
    assert (profile.optimizer_seconds > 0).all() and profile.estimated
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@given(
    seed=st.integers(0, 999), ratio=st.floats(0.2, 5.0), share=st.floats(0.05, 1.0),
    measured=st.floats(0.1, 10.0),
)  # fmt: skip
def test_a_measured_full_step_is_the_refined_profiles(
    seed: int, ratio: float, share: float, measured: float
) -> None:
    profile = replace(made_up_profile(6, seed=seed), estimated=True)
    floor, full = profile.floor_step_seconds, profile.full_step_seconds
    planned = floor + share * (full - floor)
    found = refined(profile, ratio, planned, measured * planned)
    # A wilder ratio than two is bounded only where nothing else is known.
    if full - planned >= 0.2 * full or 0.5 <= ratio <= 2:
        assert found.full_step_seconds == pytest.approx(ratio * full)
    assert not found.estimated


def test_where_one_step_tells_both_equations_hold() -> None:
    profile = made_up_profile(6, seed=1)
    # Of a forward pass that costs the same at every depth.
    profile = replace(profile, forward_seconds=np.full(6, 1e-3), estimated=True)
    floor, full = profile.floor_step_seconds, profile.full_step_seconds
    forward = float(profile.forward_seconds[-1])
    step = 0.9 * forward + 1.2 * (floor - forward)
    ratio = (0.9 * forward + 1.2 * (full - forward)) / full
    found = refined(profile, ratio, floor, step)
    assert found.full_step_seconds == pytest.approx(ratio * full)
    assert found.floor_step_seconds == pytest.approx(step)


def test_without_a_full_step_all_is_scaled_by_the_plans() -> None:
    profile = replace(made_up_profile(6, seed=1), estimated=True)
    found = refined(profile, None, 1.0, 1.5)
    assert found.full_step_seconds == pytest.approx(1.5 * profile.full_step_seconds)
    assert found.estimated


@pytest.mark.parametrize("memory", [None, 1e9])
def test_without_a_limit_all_gradients_are_there_at_once_as_in_a_step(memory: float | None) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 3))
    parameters, alive = list(model.parameters()), []

    def count(_: torch.Tensor) -> None:
        alive.append(sum(each.grad is not None for each in parameters))

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(count)
    batch = (torch.randn(4, 6), torch.tensor([0, 1, 2, 0]))
    estimate_profile(
        model, nn.functional.cross_entropy, batch, memory=memory,
        optimizer_fn=lambda given: torch.optim.SGD(given, lr=0.1),
    )  # fmt: skip
    assert max(alive) == (len(parameters) if memory is None else 1)
    assert all(parameter.grad is None for parameter in parameters)


def test_an_optimiser_is_tried_out_with_gradients_that_were_written() -> None:
    """Memory that was never written is one page, which is read faster than memory."""
    seen: list[torch.Tensor] = []

    class Watched(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            seen.extend(p.grad for group in self.param_groups for p in group["params"])
            super().step(closure)

    model = nn.Linear(6, 3)
    batch = (torch.randn(4, 6), torch.tensor([0, 1, 2, 0]))
    estimate_profile(
        model, nn.functional.cross_entropy, batch, optimizer_fn=lambda given: Watched(given, lr=0.1)
    )
    assert seen and all(bool((gradient != 0).all()) for gradient in seen)


@pytest.mark.parametrize(("width", "share"), [(64, 0.5), (4608, 0.79)])
def test_a_gradient_that_is_written_anew_is_dearer_than_the_errors_way(
    width: int, share: float
) -> None:
    model = nn.Sequential(nn.Linear(2, width), nn.Linear(width, 2048), nn.Linear(2048, 3))
    batch = (torch.randn(8, 2), torch.randint(3, (8,)))
    profile = estimate_profile(
        model, loss_fn, batch, optimizer_fn=lambda p: torch.optim.SGD(p, lr=0.1)
    )
    for index, node in enumerate(profile.graph.nodes):
        if node.group is not None and profile.graph.groups[node.group].numel > 2048 * 60:
            own, path = profile.node_update_seconds[index], profile.node_path_seconds[index]
            assert own / (own + path) == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize("boxes", [2, 3])
def test_pictures_in_a_list_are_whole_also_where_all_lengths_agree(boxes: int) -> None:
    """Three pictures of three channels with three boxes each: no part of these is a smaller batch."""

    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(3, 4, 3)

        def forward(self, pictures: list[torch.Tensor]) -> torch.Tensor:
            found: torch.Tensor = self.layer(torch.stack(pictures)).mean((2, 3))
            return found

    def boxes_loss(outputs: torch.Tensor, targets: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        return (outputs - torch.stack([each["boxes"].mean(0) for each in targets])).square().mean()

    pictures = [torch.randn(3, 8, 8) for _ in range(3)]
    batch = pictures, [{"boxes": torch.rand(boxes, 4)} for _ in range(3)]
    known = [
        estimate_profile(
            Detector(), boxes_loss, batch, memory=memory,
            optimizer_fn=lambda p: torch.optim.SGD(p, lr=0.1),
        )
        for memory in (None, 1e9)
    ]  # fmt: skip
    assert known[0].graph == known[1].graph


@given(
    spent=st.lists(st.tuples(st.integers(0, 5), st.floats(1e-6, 1.0)), max_size=30),
    less_least=st.booleans(),
)
def test_what_a_node_takes_is_the_sum_of_its_calls(
    spent: list[tuple[int, float]], less_least: bool
) -> None:
    least = min([each for _, each in spent], default=0.0) if less_least else 0.0
    found = sums_by_node(spent, 6, less_least=less_least)
    for node in range(6):
        calls = [each - least for index, each in spent if index == node]
        assert np.isnan(found[node]) if not calls else found[node] == pytest.approx(sum(calls))


def test_on_an_accelerator_nodes_share_what_a_backward_pass_takes_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock that waits for the device each node takes as long as all of them do without."""
    readings = iter(range(10**6))
    monkeypatch.setattr(estimate, "clock_for", lambda *_: lambda: float(next(readings)))
    # On the CPU by its tensors: there is no such device here.
    monkeypatch.setattr(estimate, "model_device", lambda _: torch.device("meta"))
    monkeypatch.setattr(estimate, "to_device", lambda batch, _: batch)
    found = estimate_profile(
        chain(), loss_fn, vectors(1)[0], optimizer_fn=lambda p: made("sgd", [*p])
    )
    nodes = found.node_update_seconds.sum() + found.node_path_seconds.sum()
    assert nodes == pytest.approx(1) and found.fixed_seconds == pytest.approx(0)
    assert (found.forward_seconds == 1).all()
