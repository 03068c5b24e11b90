"""The first cost profile: what the optimiser costs, and how training corrects it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kept_bytes import kept_bytes
from peak_bytes import peak_bytes
from slow_ones import slow_unless
from small_models import chain, loss_fn, sgd, vectors
from torch import nn

from fl_elastic.groups.forward import compute_loss
from fl_elastic.groups.trace import trace_step
from fl_elastic.groups.untouched import untouched
from fl_elastic.profiling import CostProfile, estimate, node_timer
from fl_elastic.profiling.estimate import estimate_profile
from fl_elastic.profiling.node_timer import TracedEdges, sums_by_node, time_nodes
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


def deep() -> nn.Module:
    layers = [
        nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        for _ in range(12)
    ]
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        *layers,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


def unrolled() -> nn.Module:
    """A network of many steps, each of whose maps a backward pass needs."""
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(12)), nn.Linear(512, 3)
    )


@pytest.mark.parametrize("share", slow_unless((0.2).__eq__, [0.05, 0.2, 0.6]))
@pytest.mark.parametrize(
    ("made_of", "shape"), [(deep, (4, 3, 64, 64)), (deep, (8, 3, 64, 64)), (unrolled, (2048, 512))]
)
def test_an_estimate_keeps_to_the_budget_it_is_made_for(
    made_of: Callable[[], nn.Module], shape: tuple[int, ...], share: float, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, batch = made_of(), (torch.randn(shape), torch.arange(shape[0]) % 3)

    def estimated(memory: float) -> CostProfile:
        return estimate_profile(model, loss_fn, batch, optimizer_fn=sgd, memory=memory)

    known = estimated(1e12)
    budget = share * float(known.saved.tensor_bytes.sum())  # type: ignore[union-attr]
    with untouched(model), torch.no_grad():
        inference = peak_bytes(lambda: model.eval()(batch[0]), tmp_path)
    found: list[CostProfile] = []
    taken = peak_bytes(lambda: found.append(estimated(budget)), tmp_path)
    # An optimiser is tried out on a weight of its own.
    trial = 4 * 4 * (1 << 17)
    assert taken <= inference + max(budget, trial)
    saved = [float(each.saved.tensor_bytes.sum()) for each in (known, found[0])]  # type: ignore[union-attr]
    assert saved[0] == saved[1]
    seconds = found[0]
    assert (seconds.forward_seconds > 0).all() and (seconds.update_seconds > 0).all()


def test_where_no_step_may_be_taken_layers_share_the_time_by_their_products() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(100, 200, bias=False),
        nn.Linear(200, 400, bias=False),
        nn.Linear(400, 10, bias=False),
    )
    batch = (torch.randn(64, 100), torch.arange(64) % 10)
    profile = estimate_profile(
        model, nn.functional.cross_entropy, batch, optimizer_fn=sgd, memory=1.0
    )
    last, middle, first = (profile.node_update_seconds + profile.node_path_seconds)[
        [nodes[0] for nodes in profile.graph.group_nodes()]
    ]
    # 400 x 10, 200 x 400 and 100 x 200 products a row, twice where the error goes on, and 16 for each number moved.
    assert middle / last == pytest.approx((160_000 + 16 * 600) / (8_000 + 16 * 410))
    # Numbers of the inputs count where they are copied.
    assert 160_000 / (20_000 + 16 * 300) < middle / first < 170_000 / (20_000 + 16 * 200)
    assert profile.estimated


class Forces(nn.Module):
    """An energy and its gradient, taken in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if x.requires_grad else x.requires_grad_()
        energy = self.energy(x)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return torch.cat([energy, force], dim=1)


def test_a_model_that_takes_gradients_in_its_forward_pass_is_looked_at_again() -> None:
    torch.manual_seed(0)
    model, batch = Forces(), (torch.randn(8, 6), torch.randn(8, 7))
    profile = estimate_profile(model, nn.functional.mse_loss, batch, optimizer_fn=sgd, memory=1e9)
    kept = kept_bytes(
        lambda: nn.functional.mse_loss(model(batch[0].clone()), batch[1]), besides=model
    )
    # A quarter of the batch was looked at.
    counted = float(profile.saved.tensor_bytes.sum())  # type: ignore[union-attr]
    assert 0.7 * kept <= counted <= 1.3 * kept
    small = estimate_profile(model, nn.functional.mse_loss, batch, optimizer_fn=sgd, memory=1.0)
    assert (small.update_seconds > 0).all()


@pytest.mark.slow
def test_of_nodes_alike_a_few_are_timed_and_stand_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells, self.head = nn.GRU(4, 6, 2, bidirectional=True), nn.Linear(12, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.cells(x)[0][-1])
            return out

    model, batch = Recurrent(), (torch.randn(150, 2, 4), torch.tensor([0, 2]))
    way = TracedEdges.of(trace_step(model, loss_fn, batch))

    def timed() -> tuple[list[float], int]:
        looks = 0

        def clock() -> float:
            nonlocal looks
            looks += 1
            return float(looks)

        seconds = time_nodes(way, compute_loss(model, loss_fn, batch), clock)
        return np.nan_to_num(seconds, nan=-1).tolist(), looks

    few, looks_at_few = timed()
    monkeypatch.setattr(node_timer, "_FEW", 10**9)
    every, looks_at_every = timed()
    assert few == every
    assert 4 * looks_at_few < looks_at_every


@pytest.mark.parametrize(("deadline", "backward_passes"), [(None, 1), (1e6, 1), (1e-9, 0)])
def test_no_step_is_timed_where_tracing_took_the_time(
    deadline: float | None, backward_passes: int
) -> None:
    model, batch = chain(), vectors()[0]
    passed: list[None] = []
    next(model.parameters()).register_hook(lambda _: passed.append(None))
    found = estimate_profile(model, loss_fn, batch, optimizer_fn=sgd, deadline=deadline)
    assert len(passed) == backward_passes
    assert found.full_step_seconds > found.floor_step_seconds > 0


SECONDS: list[float] = []


class Unrolled(nn.Module):
    """A cell that runs once per time step, at a cost that hardly depends on the number of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(3, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        SECONDS.append(1 + len(x) / 8)
        state = x.new_zeros(len(x), 4)
        for step in x.unbind(1):
            state = self.cell(step, state)
        out: torch.Tensor = self.head(state)
        return out


@pytest.mark.parametrize(("examples", "memory"), [(3, 1e9), (32, 1e9), (32, 1.0), (32, None)])
def test_what_does_not_grow_with_the_batch_is_not_scaled_up(
    examples: int, memory: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Unrolled()
    batch = (torch.randn(examples, 2, 3), torch.arange(examples) % 3)
    monkeypatch.setattr(estimate, "clock_for", lambda *_: lambda: sum(SECONDS))
    found = estimate_profile(model, loss_fn, batch, optimizer_fn=sgd, memory=memory)
    assert found.forward_seconds == pytest.approx(1 + examples / 8)


@pytest.mark.parametrize(("steps", "recorded"), [(2, True), (100, False)])
def test_a_record_takes_no_more_than_the_step_that_it_is_of(
    steps: int, recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def seen(profile: CostProfile, *more: Any) -> CostProfile:
        given.extend(more[3])
        return profile

    monkeypatch.setattr(estimate, "with_bytes_beside", seen)
    batch = (torch.randn(8, steps, 3), torch.arange(8) % 3)
    estimate_profile(Unrolled(), loss_fn, batch, optimizer_fn=sgd, memory=1e12)
    assert bool(given) is recorded
