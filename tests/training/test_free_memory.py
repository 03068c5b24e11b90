"""Free memory is given back where training comes near its budget, and nowhere else."""

from __future__ import annotations

import pytest
from torch import nn, ones

from fl_elastic.training.free_memory import FreeMemory, give_back, resident_bytes


class Process:
    """A process that keeps what it freed until it is told to give it back."""

    def __init__(self) -> None:
        self.held = 500_000_000
        self.free = 0
        self.trims = self.looks = 0

    def resident(self) -> int:
        self.looks += 1
        return self.held + self.free

    def trim(self) -> None:
        self.free = 0
        self.trims += 1


def watched(process: Process, budget: float) -> FreeMemory:
    return FreeMemory(budget, resident=process.resident, trim=process.trim)


def step(memory: FreeMemory, model: nn.Module, inference: float) -> None:
    with memory.watching(model, inference):
        model(ones(1 << 10, 1 << 10)).sum().backward()


@pytest.mark.parametrize(("budget", "near"), [(100e6, True), (1e9, False)])
def test_what_lies_free_is_given_back_near_the_budget_alone(budget: float, near: bool) -> None:
    process, model = Process(), nn.Sequential(nn.Linear(1 << 10, 1 << 10), nn.ReLU())
    memory = watched(process, budget)
    before = process.trims
    process.free = 90_000_000
    step(memory, model, 50e6)
    assert (process.trims > before, process.free == 0) == (near, near)


def test_what_a_convolution_orders_anew_is_room_that_it_needs() -> None:
    # Maps of 8 kB, and 9.4 MB of weights that the library copies into blocks for its backward pass.
    process, model = Process(), nn.Conv2d(1 << 9, 1 << 9, 3, padding=1)
    memory = watched(process, 100e6)
    before = process.trims
    process.free = 55_000_000
    with memory.watching(model, 0.0):
        model(ones(1, 1 << 9, 2, 2)).sum().backward()
    assert process.trims > before and process.free == 0


@pytest.mark.parametrize(("rows", "looks"), [(1 << 3, 1), (1 << 10, 61)])
def test_a_check_comes_once_in_five_megabytes_however_many_layers_there_are(
    rows: int, looks: int
) -> None:
    process, model = Process(), nn.Sequential(*[nn.Tanh() for _ in range(100)])
    memory = watched(process, 1e9)
    before = process.looks
    x = ones(rows, 128, requires_grad=True)
    with memory.watching(model, 0.0):
        for _ in range(2):
            model(x).sum().backward()
    # 100 layers take in and put out 8 kB or 1 MB, in two passes back and, once that is known, in one forward.
    assert process.looks - before == pytest.approx(looks, abs=2)


def test_under_a_tiny_budget_nobody_looks() -> None:
    process, model = Process(), nn.Sequential(nn.Linear(1 << 10, 1 << 10), nn.ReLU())
    memory = watched(process, 1e6)
    process.free = 10**9
    with memory.watching(model, 0.0):
        assert not any(module._forward_hooks for module in model.modules())
    assert process.trims == 0


def test_no_hook_stays_behind() -> None:
    process, model = Process(), nn.Sequential(nn.Linear(1 << 10, 1 << 10), nn.ReLU())
    step(watched(process, 100e6), model, 0.0)
    modules = list(model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in modules)


def test_the_platform_is_asked_without_harm() -> None:
    give_back()
    told = resident_bytes()
    assert told is None or told > 0
