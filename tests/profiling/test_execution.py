"""Threads and memory format are chosen by measured steps, and change no result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from fl_elastic import Budget, ElasticTrainer
from fl_elastic.planning import policies
from fl_elastic.profiling import execution
from fl_elastic.profiling.execution import (
    Execution,
    load_or_measure_execution,
    measure_execution,
)


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 4),
    )  # fmt: skip


def batch_of() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 3, 8, 8, generator=generator), torch.tensor([0, 1, 2, 3])


class Stopwatch:
    """Time that passes as the settings in force say, whatever really passes."""

    def __init__(self, seconds: Callable[[int, bool], float], model: nn.Module) -> None:
        self.seconds, self.model, self.now = seconds, model, 0.0

    def __call__(self) -> float:
        weight = self.model[0].weight  # type: ignore[index]
        last = weight.is_contiguous(memory_format=torch.channels_last)
        self.now += self.seconds(torch.get_num_threads(), last) / 2
        return self.now


@pytest.mark.parametrize(
    ("seconds", "most", "expected"),
    [
        (lambda threads, last: 1.0, 4, Execution(1)),
        (lambda threads, last: 1.0 / threads, 3, Execution(3)),
        (lambda threads, last: 1.0 if threads == 2 else 2.0, 4, Execution(2)),
        (lambda threads, last: 0.5 if last else 1.0, 2, Execution(1, channels_last=True)),
        # Not worth it.
        (lambda threads, last: 1.0 - 0.01 * threads - 0.02 * last, 4, Execution(1)),
    ],
)
def test_the_fastest_is_taken_and_the_simplest_of_equals(
    seconds: Callable[[int, bool], float], most: int, expected: Execution
) -> None:
    model = model_of()
    clock = Stopwatch(seconds, model)
    chosen = measure_execution(
        model, nn.functional.cross_entropy, batch_of(), most_threads=most, clock=clock
    )
    assert chosen == expected


def test_measuring_leaves_no_trace() -> None:
    model = model_of()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    measure_execution(model, nn.functional.cross_entropy, batch_of(), most_threads=2)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    assert model[0].weight.is_contiguous()  # type: ignore[index, union-attr, operator]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("policy", policies())
def test_channels_last_changes_no_update(policy: str) -> None:
    updates = []
    for form in (False, True):
        model = model_of()
        Execution(1, channels_last=form).apply(model)
        trainer = ElasticTrainer(
            model, nn.functional.cross_entropy, lambda p: torch.optim.SGD(p, lr=0.1),
            budget=Budget(), policy=policy,
        )  # fmt: skip
        try:
            trainer.fit([batch_of(), batch_of()])
        except ValueError as refusal:
            updates.append(str(refusal))
            continue
        updates.append(trainer.update())
    one, other = updates
    if isinstance(one, str) or isinstance(other, str):
        assert one == other
        return
    # What is chosen may rest on measured times; what both train must agree.
    common = set(one.deltas) & set(other.deltas)
    assert common
    if one.steps == other.steps and not one.parts and not other.parts:
        for name in common:
            torch.testing.assert_close(
                torch.as_tensor(one.deltas[name]), torch.as_tensor(other.deltas[name]),
                rtol=1e-3, atol=1e-5,
            )  # fmt: skip


def test_settings_are_kept_per_case_and_measured_anew_when_damaged(tmp_path: Path) -> None:
    path, asked = tmp_path / "execution.state", []

    def measure() -> Execution:
        asked.append(1)
        return Execution(2, channels_last=True)

    for _ in range(3):
        assert load_or_measure_execution(path, "a", measure) == Execution(2, True)
    assert len(asked) == 1
    load_or_measure_execution(path, "b", measure)
    for damage in (b"", b"{", b"[]", b'{"case": "b", "threads": 0, "channels_last": true}'):
        path.write_bytes(damage)
        load_or_measure_execution(path, "b", measure)
    assert len(asked) == 6
    assert execution.Execution(2, True) == load_or_measure_execution(
        Path("/dev/full/x"), "b", measure
    )
