"""The memory benchmark: its ways to run a plan, and what it counts."""

from __future__ import annotations

import json

import pytest
import torch
from small_subject import small_subject

from fl_elastic.budget import Budget
from fl_elastic.groups import Mode
from fl_elastic.methods.joint.policy import JointPolicy
from fl_elastic.planning import Plan
from fl_elastic.planning.lean_layers import LeanLayers
from fl_elastic.planning.plain import FullPolicy
from fl_elastic.planning.recompute import Recomputation
from fl_elastic.profiling.memory import step_memory
from fl_elastic_simulations.benchmarks import memory
from fl_elastic_simulations.benchmarks.memory import Subject, memory_row
from fl_elastic_simulations.benchmarks.steps import (
    SavedBytes,
    interleaved_seconds,
    saved_bytes,
    vanilla,
)


@pytest.fixture(scope="module")
def small() -> Subject:
    return small_subject()


def plan_of(small: Subject, **changes: object) -> Plan:
    full = small.plan(FullPolicy(), Budget())
    return Plan(**{**vars(full), **changes})


def test_saved_bytes_of_one_convolution_and_the_head_by_hand(small: Subject) -> None:
    names = [group.name for group in small.profile.graph.groups]
    modes = [Mode.FROZEN] * len(names)
    modes[names.index("5")] = modes[names.index("2.2")] = Mode.FULL
    saved = saved_bytes(small.model, plan_of(small, modes=tuple(modes)), small.batches[0])
    # Inputs of the convolution and the head, and of the loss: the log probabilities and the classes.
    inputs = 4 * 8 * 16 * 8 * 8 + 4 * 8 * 16
    loss = 4 * 8 * 4 + 8 * 8
    assert inputs <= saved.stored <= inputs + loss + 64
    assert saved.largest_block == 0 and saved.total == saved.stored


def test_counting_leaves_the_model_as_it_was(small: Subject) -> None:
    before = {name: value.clone() for name, value in small.model.state_dict().items()}
    plan = small.plan(JointPolicy(), Budget(memory=20_000.0))
    saved_bytes(small.model, plan, small.batches[0])
    interleaved_seconds(small.model, [plan, vanilla(plan)], small.batches[0], repeats=1)
    after = small.model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert all(p.requires_grad and p.grad is None for p in small.model.parameters())


def test_a_recomputed_block_is_counted_while_it_runs_again(small: Subject) -> None:
    block = next(b for b in small.profile.graph.blocks if b.module == "2")
    lean = LeanLayers(everywhere=True)
    plain = plan_of(small, transforms=(lean,))
    again = plan_of(small, transforms=(lean, Recomputation(("2",))))
    stored, recomputed = (
        saved_bytes(small.model, plan, small.batches[0]) for plan in (plain, again)
    )
    assert recomputed.stored < stored.stored
    # The outputs of its first convolution, for the rectifier and the second one.
    assert recomputed.largest_block >= 4 * 8 * 16 * 8 * 8
    assert recomputed.total <= stored.total + recomputed.largest_block
    said = step_memory(small.profile, again.modes, lean=True, recomputed=[block])
    assert recomputed.total <= said.activations * 1.02


def test_totals_are_of_both() -> None:
    assert SavedBytes(100, 20).total == 120


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Plans whose peaks are asked for, which are 1,000 bytes, 2,000 and so on."""
    asked: list[Plan] = []

    def peak(of: Subject, plan: Plan) -> int:
        asked.append(plan)
        return 1000 * len(asked)

    monkeypatch.setattr(memory, "peak_in_fresh_process", peak)
    memory._full_step.cache_clear()
    return asked


def test_a_row_holds_all_ways_and_what_was_predicted(small: Subject, peaks: list[Plan]) -> None:
    row = memory_row(small, 3, repeats=1)
    weights = 8 * sum(p.numel() for p in small.model.parameters())
    assert row["budget_bytes"] == pytest.approx((row["saved_bytes_full"] + weights) / 3)
    assert row["predicted_bytes"] <= row["budget_bytes"]
    # What lean layers save shows where they are tested; a plan of few groups here may have nothing to save. A lean
    # rectifier adds a bit per output where the next layer keeps that output anyway.
    assert 0 < row["saved_bytes_lean"] <= row["saved_bytes_vanilla"] * (1 + 1 / 32)
    assert row["saved_bytes_vanilla"] <= row["saved_bytes_full"]
    assert [row[f"peak_bytes_{way}"] for way in ("full", "lean", "vanilla")] == [1000, 2000, 3000]
    assert [plan.lean for plan in peaks] == [False, True, False]
    assert {mode.kind for plan in peaks for mode in plan.modes} <= {"full", "frozen"}
    json.dumps(row)
    table = memory.BENCHMARK.tables({"small | 1/3": row})["budgets"]
    assert table.loc["small", "budget"] == "1/3"


def test_everything_is_trained_in_the_least_memory(small: Subject, peaks: list[Plan]) -> None:
    row = memory_row(small, 0, repeats=1)
    assert row["groups"] == len(small.profile.graph.groups)
    assert row["predicted_bytes"] == pytest.approx(row["budget_bytes"], abs=1)
    assert row["saved_bytes_vanilla"] == row["saved_bytes_full"]
    # A lean rectifier adds a bit per output where the next layer keeps that output anyway.
    assert row["saved_bytes_lean"] <= row["saved_bytes_full"] * (1 + 1 / 32)


def test_a_refused_budget_is_a_row_of_its_own(small: Subject, peaks: list[Plan]) -> None:
    row = memory_row(small, 100_000)
    assert set(row) == {"budget_bytes", "refused"} and row["refused"]
    table = memory.BENCHMARK.tables({"small | 1/100": row})["budgets"]
    assert table.loc["small", "groups"] == "refused"


@pytest.mark.slow
def test_a_fresh_process_tells_what_a_step_takes(small: Subject) -> None:
    of = memory._subject("squeezenet1_0")
    plan = of.plan(FullPolicy(), Budget())
    saved = saved_bytes(of.model, plan, of.batches[0]).total
    peak = memory.peak_in_fresh_process(of, plan)
    weights = 8 * sum(p.numel() for p in of.model.parameters())
    assert 0.8 * (saved + weights) < peak < 3 * (saved + weights)
